"""The machine is described without guessing, and Triton's mode is settled before Triton loads."""

import os
import subprocess
import sys
import types

import pytest
import torch

from helpers import device

NEEDS_TRITON = pytest.mark.skipif(not device.triton_version(), reason="Triton is not installed")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LECTURES_PROFILE")}
    return subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True
    )


def test_profile_precedence(monkeypatch):
    monkeypatch.setenv("LECTURES_PROFILE", "full")
    assert device.profile("smoke") == "smoke"  # the parameter beats the environment
    assert device.profile("auto") == device.profile() == "full"
    monkeypatch.setenv("LECTURES_PROFILE", "auto")
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert device.profile() == "full"
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert device.profile() == "smoke"
    monkeypatch.delenv("LECTURES_PROFILE")
    assert device.profile() == "smoke"


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_unknown_profile_is_refused(monkeypatch, source):
    monkeypatch.setenv("LECTURES_PROFILE", "huge" if source == "environment" else "smoke")
    with pytest.raises(ValueError, match="LECTURES_PROFILE" if source == "environment" else "huge"):
        device.profile("huge" if source == "argument" else "auto")


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen without a GPU")
def test_interpreter_is_chosen_before_triton_loads():
    done = python(
        "from helpers import device; import triton.language as tl;"
        "print(device.interpreting(), type(tl.cdiv).__name__)"
    )
    assert done.stdout.split() == ["True", "InterpretedFunction"], done.stderr


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen without a GPU")
def test_triton_loaded_in_the_wrong_mode_is_one_clear_sentence():
    done = python("import triton.language; import helpers.device")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: Triton was loaded in compiler mode before helpers.device")
    assert "restart" in last


def test_interpreting_on_a_gpu_machine_means_cpu_tensors(monkeypatch):
    monkeypatch.setattr(device, "_gpu_usable", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not device.has_cuda()
    assert device.device().type == "cpu"
    assert device.slug() == "cpu"


def fake_gpu(monkeypatch, capability=(9, 0), **properties):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: properties["name"])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(**properties)
    )
    device._gpu_usable.cache_clear()
    device._nvml_handle.cache_clear()


@pytest.fixture
def clean_caches():
    yield
    device._gpu_usable.cache_clear()
    device._nvml_handle.cache_clear()


@pytest.mark.case("E24")
def test_missing_properties_are_said_to_be_unknown(monkeypatch, clean_caches):
    """Case E24: property names vary by torch version and vendor; the name may be unknown."""
    fake_gpu(monkeypatch, name="AMD Radeon Graphics", major=9, minor=4, uuid=None)
    facts = device.facts("smoke")
    assert facts["Device"] == "AMD Radeon Graphics"
    assert facts["L2 cache"] == facts["Memory"] == facts["SM clock now"] == device.UNKNOWN
    assert device.slug() == "amd_radeon_graphics"


def test_known_properties_are_shown_with_units(monkeypatch, clean_caches):
    fake_gpu(
        monkeypatch,
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=140 * 2**30,
        L2_cache_size=60 * 2**20,
        shared_memory_per_block_optin=227 * 1024,
    )
    facts = device.facts("full")
    assert facts["Memory"] == "140 GiB"
    assert facts["L2 cache"] == "60 MiB"
    assert facts["Shared memory per block"] == "227 KiB"
    assert device.slug() == "nvidia_h200"


@pytest.mark.case("E15")
def test_a_gpu_too_old_for_triton_is_left_aside(monkeypatch, clean_caches):
    fake_gpu(monkeypatch, capability=(6, 1), name="NVIDIA GeForce GTX 1080")
    assert not device.has_cuda()
    assert "too old" in device.facts()["GPU"]


def test_describe_is_one_aligned_table(capsys):
    device.describe("smoke")
    lines = capsys.readouterr().out.splitlines()
    assert {"Device", "PyTorch", "Triton", "Profile", "Date"} <= {
        line.split("  ")[0] for line in lines
    }
    column = max(len(name) for name in device.facts("smoke")) + 2
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_sensors_without_a_gpu_are_empty():
    if not device.has_cuda():
        assert device.sensors() == {}


@pytest.fixture
def nvml(monkeypatch, clean_caches):
    """NVML, as it answers for the one GPU of this UUID, whose power it hides."""
    pynvml = pytest.importorskip("pynvml")
    fake_gpu(monkeypatch, name="NVIDIA H200", major=9, minor=0, uuid="5eed-0007")

    def hidden(_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    handles = {"GPU-5eed-0007": "handle"}
    mhz = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handles.__getitem__,
        "nvmlDeviceGetClockInfo": lambda handle, domain: mhz[domain],
        "nvmlDeviceGetMaxClockInfo": lambda handle, domain: 1985,
        "nvmlDeviceGetPowerUsage": hidden,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: (
            pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return pynvml


def test_sensors_are_of_the_gpu_in_use_and_a_closed_one_is_left_out(nvml):
    assert device.sensors() == {
        "sm_mhz": 1980,
        "sm_max_mhz": 1985,
        "memory_mhz": 3201,
        "power_limit_w": 700,
        "temperature_c": 41,
    }
    facts = device.facts("smoke")
    assert facts["SM clock now"] == "1,980 MHz (up to 1,985)"
    assert facts["Power now"] == device.UNKNOWN


def test_what_holds_the_clock_down_is_in_nvmls_words(nvml, monkeypatch):
    assert set(device.clock_limits()) == {"SwPowerCap", "GpuIdle"}
    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda _: 0)
    assert device.clock_limits() == ()
    monkeypatch.delattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons")  # an older library
    assert device.clock_limits() == ()


def test_a_gpu_that_nvml_does_not_know_has_no_sensors(nvml, monkeypatch):
    """A MIG slice, or a container without permission."""

    def unknown(_):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", unknown)
    assert device.sensors() == {} and device.clock_limits() == ()
