"""Reading ncu's output, and saying why it cannot be had."""

import subprocess

import pytest

from helpers import counters

OUTPUT = """==PROF== Connected to process 17
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","17","add","dram__bytes_read.sum","byte","536,870,912"
"0","17","add","gpu__time_duration.sum","ns","190000"
"1","17","mul","dram__bytes_read.sum","byte","1024"
"1","17","mul","gpu__time_duration.sum","ns","2000.5"
"""


@pytest.fixture
def with_ncu(monkeypatch):
    monkeypatch.setattr(counters, "has_cuda", lambda: True)
    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/usr/bin/{name}")

    def answer(stdout="", stderr="", returncode=0):
        done = subprocess.CompletedProcess([], returncode, stdout, stderr)
        monkeypatch.setattr(counters.subprocess, "run", lambda *a, **k: done)

    return answer


def test_counters_become_a_frame(with_ncu):
    with_ncu(OUTPUT)
    frame, reason = counters.read_counters("pass")
    assert reason == ""
    assert frame["kernel"].tolist() == ["add", "mul"]
    assert frame["dram__bytes_read.sum"].tolist() == [536870912, 1024]
    assert frame["gpu__time_duration.sum"].tolist() == [190000, 2000.5]


def test_no_permission_is_one_sentence(with_ncu):
    with_ncu("==ERROR== ERR_NVGPUCTRPERM: no permission to access the counters", returncode=1)
    frame, reason = counters.read_counters("pass")
    assert frame is None
    assert reason.endswith("ERR_NVGPUCTRPERM: no permission to access the counters")


def test_no_gpu_and_no_ncu_are_told_apart(monkeypatch):
    monkeypatch.setattr(counters, "has_cuda", lambda: False)
    assert counters.read_counters("pass") == (None, "there is no GPU here")
    monkeypatch.setattr(counters, "has_cuda", lambda: True)
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert "not installed" in counters.read_counters("pass")[1]


def test_the_command_leaves_the_clocks_alone():
    command = counters.ncu_command("print(1)", kernel="gemm")
    assert command[0] == "ncu" and command[-2:] == ["-c", "print(1)"]
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--kernel-name") + 1] == "regex:gemm"
