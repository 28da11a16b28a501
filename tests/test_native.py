"""The CPU's own kernels against references, and their library made by two processes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import cuda, native
from helpers.ptx import ToolMissing

SIZES = (1, 7, 64, 1000, 4097)


@pytest.fixture(autouse=True)
def _compiler():
    try:
        native.load()
    except ToolMissing as reason:
        pytest.skip(str(reason))


def numbers(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chains", range(1, native.MAX_CHAINS + 1))
def test_chains_end_where_their_steps_lead(chains):
    n, steps = 1009, 2503
    places = torch.randperm(n, generator=torch.Generator().manual_seed(chains))
    ring = torch.empty(n, dtype=torch.int32)
    ring[places] = places.roll(-1).int()
    begun = torch.arange(chains) * 61
    at = places[begun].int()
    assert native.chase(ring, at, steps) > 0
    assert torch.equal(at.long(), places[(begun + steps) % n])
    native.chase(ring, at, 0)
    assert torch.equal(at.long(), places[(begun + steps) % n])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reads_copies_and_triads(n, threads):
    x, z = numbers(n + 3)[3:], numbers(n, seed=1)  # x is at no aligned address
    for stride in (1, 2, 3, 16, n + 5):
        _, total = native.read(x, threads, stride)
        assert total == pytest.approx(x.double()[::stride].sum().item(), rel=1e-4, abs=1e-3)
    y = torch.full((n,), torch.nan)
    native.copy(x, y, threads)
    assert torch.equal(y, x)
    native.triad(x, z, y, 3.0, threads)
    torch.testing.assert_close(y.double(), x.double() + 3 * z.double(), rtol=1e-6, atol=1e-6)


def test_a_sum_covers_the_last_element():
    x = torch.zeros(1000)
    for place in (0, 511, 512, 999):
        x.zero_()[place] = 1
        assert native.read(x, 3)[1] == 1
        assert native.read(x, 2, stride=4)[1] == (place % 4 == 0)


@pytest.mark.parametrize("steps", [0, 1, 2, 33])
def test_multiply_adds(steps):
    a, b = -0.75, 0.5
    values = numbers(3 * native.fma_width()).view(3, -1)
    expected = values.double()
    for _ in range(steps):
        expected = a * expected + b
    one = values[0, :1].clone()
    native.fma_chain(one, a, b, steps)
    native.fma_all(values, a, b, steps)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.double(), expected[0, :1], rtol=1e-5, atol=1e-6)


def test_an_addition_takes_time():
    assert 0 < native.add_ns(100) < 1000


def test_an_addition_is_one_of_all_steps(monkeypatch):
    class Library:
        def cpu_add_chain(self, steps, address):
            ctypes.c_int64.from_address(address).value = steps
            return 3 * steps

    monkeypatch.setattr(native, "load", Library)
    assert [native.add_ns(steps) for steps in (1, 100, 1 << 20)] == [3, 3, 3]


def test_clear_errors():
    ring, at = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"ring must be torch.int32 .* not torch.int64"):
        native.chase(ring.long(), at, 1)
    for count in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 chains, not {count}"):
            native.chase(ring, at.new_zeros(count), 1)
    with pytest.raises(ValueError, match="contiguous"):
        native.read(torch.zeros(8)[::2], 1)
    with pytest.raises(ValueError, match="stride must be at least 1"):
        native.read(torch.zeros(8), 1, 0)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        native.read(torch.zeros(8), 0)
    with pytest.raises(ValueError, match="of 8 elements"):
        native.copy(torch.zeros(8), torch.zeros(7), 1)
    with pytest.raises(ValueError, match=r"values must be \(threads, "):
        native.fma_all(torch.zeros(3), 1.0, 1.0, 1)


def test_no_compiler_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissing, match="g\\+\\+ compiles on Linux, and there is none"):
        native.load()
    with cuda.where_possible():
        native.add_ns()
    assert capsys.readouterr().out.startswith("Left out here: ")


def test_another_process_with_an_empty_cache(tmp_path):
    script = "from helpers import native; print(native.add_ns(3200) > 0)"
    environment = {**os.environ, "LECTURES_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.stdout.strip() == b"True", done.stderr
    assert len(list((tmp_path / "native").iterdir())) == 1


@pytest.mark.parametrize("halves", [1, 2])
def test_half_a_library_is_made_again_once(tmp_path, monkeypatch, halves):
    whole, made = Path(native.load()._name), []

    def compiler(command):
        made.append(whole.read_bytes() if len(made) == halves else b"half")
        command[-1].write_bytes(made[-1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path))
    monkeypatch.setattr(native.toolchain, "run", compiler)
    native._library.cache_clear()
    try:
        if halves == 1:
            assert native.load().cpu_fma_width() > 0
        else:
            with pytest.raises(ToolMissing, match="cannot be loaded"):
                native.load()
            assert not any((tmp_path / "native").iterdir())
    finally:
        native._library.cache_clear()
    assert len(made) == 2


def test_what_the_compiler_says_is_passed_on(tmp_path, monkeypatch):
    said = subprocess.CompletedProcess([], 1, "", "cpu_memory.cpp:1: error: no such thing")
    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path))
    monkeypatch.setattr(native.toolchain, "run", lambda _: said)
    native._library.cache_clear()
    with pytest.raises(ToolMissing, match=r"g\+\+ cannot compile cpu_memory.cpp: .* no such thing"):
        native.load()
