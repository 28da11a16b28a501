"""What this machine is: its device, its size profile, its toolchain.

Import this module before anything that loads Triton. Triton decides when a kernel is *defined*
whether it will be interpreted on the CPU or compiled for a GPU, so the choice
(`TRITON_INTERPRET`) must stand in the environment first.
"""

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import torch

from helpers import cache

PROFILES = ("smoke", "full")
MIN_CAPABILITY = (7, 0)  # Volta: the oldest generation that Triton and torch.compile accept
UNKNOWN = "n/a"


@functools.cache
def _gpu_usable() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MIN_CAPABILITY


def interpreting() -> bool:
    """True when Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_cuda() -> bool:
    """True when measurements run on a GPU: one is there, and Triton is not interpreting."""
    return _gpu_usable() and not interpreting()


def device() -> torch.device:
    """The device that the notebooks put their tensors on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def synchronize() -> None:
    """Wait until the GPU has finished everything queued so far; nothing to wait for on a CPU."""
    if has_cuda():
        torch.cuda.synchronize()


def profile(choice: str = "auto") -> str:
    """The size of a run: "smoke" (seconds, for a laptop and for tests) or "full" (for a GPU).

    The first of these that is not "auto" decides: `choice` (the papermill parameter), the
    environment variable LECTURES_PROFILE, and last the machine: full on a GPU, else smoke.
    """
    for source, value in (
        ("profile", choice),
        ("LECTURES_PROFILE", os.environ.get("LECTURES_PROFILE") or "auto"),
    ):
        if value not in (*PROFILES, "auto"):
            raise ValueError(f'{source} must be "smoke", "full" or "auto", not {value!r}')
        if value != "auto":
            return value
    return "full" if has_cuda() else "smoke"


def slug() -> str:
    """A name for files and folders: "nvidia_h200", or "cpu"."""
    name = torch.cuda.get_device_name() if has_cuda() else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def device_name() -> str:
    """The device's name as its maker prints it, for tables and for a figure's small print."""
    return torch.cuda.get_device_name() if has_cuda() else _cpu_name()


def triton_version() -> str:
    """Triton's version, "" where it is not installed (it has no wheels for macOS and Windows)."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def sensors() -> dict[str, float]:
    """Clocks (MHz), power (W) and temperature (°C) of the GPU at this moment, through NVML.

    What cannot be read (no GPU, no NVML, a virtual machine that hides it) is left out.
    """
    handle = _nvml_handle()
    if handle is None:
        return {}
    import pynvml

    readings = {
        "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "sm_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
    }
    found = {}
    for name, read in readings.items():
        try:
            found[name] = float(read())
        except pynvml.NVMLError:  # one sensor may be closed while the others answer
            continue
    return found


def clock_limits() -> tuple[str, ...]:
    """What holds the GPU's clock down at this moment, in NVML's words; () where unknown."""
    handle = _nvml_handle()
    if handle is None:
        return ()
    import pynvml

    try:
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (AttributeError, pynvml.NVMLError):  # older libraries call it ThrottleReasons
        return ()
    prefix = "nvmlClocksEventReason"
    names = [n for n in dir(pynvml) if n.startswith(prefix) and not n.endswith(("All", "None"))]
    return tuple(n.removeprefix(prefix) for n in names if bits & getattr(pynvml, n))


@functools.cache
def _nvml_handle():
    if not has_cuda() or torch.version.hip:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers devices for CUDA but not for NVML: only the UUID is safe.
        uuid = getattr(torch.cuda.get_device_properties(device()), "uuid", None)
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no NVML library, a MIG slice, a container without permission
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _value(properties, name: str, per_unit: float, unit: str) -> str:
    # Names of device properties differ between torch versions and vendors.
    value = getattr(properties, name, None)
    return UNKNOWN if value is None else f"{value / per_unit:,.0f} {unit}"


def _gpu_facts() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device())
    now = sensors()

    def reading(name: str, limit: str, unit: str) -> str:
        if name not in now:
            return UNKNOWN
        top = f" (up to {now[limit]:,.0f})" if limit in now else ""
        return f"{now[name]:,.0f} {unit}{top}"

    return {
        "Device": properties.name,
        "Compute capability": f"{properties.major}.{properties.minor}",
        "SMs": str(getattr(properties, "multi_processor_count", UNKNOWN)),
        "Memory": _value(properties, "total_memory", 2**30, "GiB"),
        "L2 cache": _value(properties, "L2_cache_size", 2**20, "MiB"),
        "Shared memory per block": _value(properties, "shared_memory_per_block_optin", 1024, "KiB"),
        "SM clock now": reading("sm_mhz", "sm_max_mhz", "MHz"),
        "Memory clock now": reading("memory_mhz", "", "MHz"),
        "Power now": reading("power_w", "power_limit_w", "W"),
        "CUDA": torch.version.cuda or f"ROCm {torch.version.hip}",
    }


def _cpu_facts() -> dict[str, str]:
    import psutil

    return {
        "Device": _cpu_name(),
        "Cores": f"{os.cpu_count()}, of which PyTorch uses {torch.get_num_threads()}",
        "Memory": f"{psutil.virtual_memory().total / 2**30:,.0f} GiB",
        "GPU": "too old for Triton (needs compute capability 7.0)"
        if torch.cuda.is_available() and not _gpu_usable()
        else "left aside: TRITON_INTERPRET=1 is set"
        if torch.cuda.is_available()
        else "none: Triton kernels run in its interpreter"
        if triton_version()
        else "none",
    }


def facts(choice: str = "auto") -> dict[str, str]:
    """What a reader must know of this machine to compare numbers, as name -> printable value."""
    from helpers import toolchain  # which imports this module

    compilers = [name for name in ("g++", "clang++", "nvcc", "ncu", "nsys") if shutil.which(name)]
    missing = toolchain.missing()
    return {
        **(_gpu_facts() if has_cuda() else _cpu_facts()),
        "PyTorch": torch.__version__,
        "Triton": triton_version() or "not installed",
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "Compilers and profilers": ", ".join(compilers) or "none found",
        **({"Missing": missing} if missing else {}),
        "Profile": profile(choice),
        "Date": datetime.date.today().isoformat(),
    }


def describe(choice: str = "auto") -> None:
    """Print `facts` as one table. Every notebook starts with it: numbers need their machine."""
    rows = facts(choice)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _set_triton_mode() -> None:
    if not _gpu_usable():
        os.environ["TRITON_INTERPRET"] = "1"
    language = sys.modules.get("triton.language")
    if language is None:
        return
    # Triton's own library functions tell which mode it was loaded in.
    loaded_interpreting = type(language.cdiv).__name__ == "InterpretedFunction"
    if loaded_interpreting != interpreting():
        raise RuntimeError(
            f"Triton was loaded in {'interpreter' if loaded_interpreting else 'compiler'} mode "
            f"before helpers.device, but this machine needs the other one: restart Python (the "
            f"notebook's kernel) and import helpers.device first."
        )


cache.leave_home()
_set_triton_mode()
