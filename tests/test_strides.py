"""Strided, shifted and repeated reads: what they touch, against models; and their frames."""

import sys
import types

import pytest
import torch

from helpers import cuda, native, strides
from helpers.device import has_cuda
from helpers.emulator import Unsupported

on_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("stride", strides.STRIDES)
def test_sectors_of_a_strided_read_are_those_of_the_model(stride, rounds):
    n, blocks = 4096, 2
    x = torch.rand(n * stride, generator=torch.Generator().manual_seed(stride))
    sums = torch.zeros(blocks * strides.BLOCK)
    kernel = cuda.load("memory.cu", "read_strided")
    try:
        counts = kernel.emulate(blocks, strides.BLOCK, x, sums, n, stride, 0, rounds)
    except Unsupported as reason:
        pytest.skip(str(reason))
    expected = rounds * x[::stride].double().sum().item()
    assert sums.double().sum().item() == pytest.approx(expected, rel=1e-6)
    assert counts.bytes_read == 4 * n * rounds
    assert counts.load_requests == n * rounds // 32 and counts.stores == blocks * strides.BLOCK
    for pieces, size in ((counts.load_sectors, 32), (counts.load_lines, 128)):
        assert 4 * n * rounds / (size * pieces) == 4 / min(4 * stride, size)


def test_strided_launch_of_rounds():
    x = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    run = strides.strided_launch(x, 1600, 3, offset=7, rounds=3)
    try:
        sums = run()
    except Unsupported as reason:
        pytest.skip(str(reason))
    expected = 3 * x[7 : 7 + 4800 : 3].double().sum().item()
    assert sums.double().sum().item() == pytest.approx(expected, rel=1e-6)


def test_launches_that_cannot_be():
    x = torch.zeros(64)
    with pytest.raises(ValueError, match="33 floats with a stride of 2 do not fit in 64"):
        strides.strided_launch(x, 33, 2)
    with pytest.raises(ValueError, match="too few to measure"):
        strides.strides(footprint_bytes=100)
    with pytest.raises(ValueError, match="from 1 on"):
        strides.strides([0])
    with pytest.raises(ValueError, match="from 1 on"):
        strides.strides([1], rounds=0)
    with pytest.raises(ValueError, match="from 0 on"):
        strides.misaligned([-1])


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_strides_and_misaligned_reads(compiled, where):
    found = strides.strides([1, 16], 1 << 16, budget_s=0.01, where=where, rounds=2)
    assert list(found.columns) == ["stride_bytes", "useful_gb_per_s"]
    assert found["stride_bytes"].tolist() == [4, 64]
    other = strides.misaligned([0, 3], 1 << 16, threads=2, budget_s=0.01, where=where)
    assert list(other.columns) == ["offset_bytes", "gb_per_s"]
    assert other["offset_bytes"].tolist() == [0, 12]
    assert (found["useful_gb_per_s"] > 0).all() and (other["gb_per_s"] > 0).all()


@pytest.fixture
def reads(monkeypatch):
    """What is read on a CPU where each read takes 1,000 ns: its floats, threads and stride."""
    found = []

    def read(x, threads, stride=1):
        found.append((x.numel(), threads, stride))
        return 1000, 0.0

    monkeypatch.setattr(native, "read", read)
    return found


def test_a_rate_is_of_the_floats_that_are_asked_for(reads):
    found = strides.strides([1, 3, 16], 1 << 14, threads=2, budget_s=0, where="cpu")
    assert found.values.tolist() == [[4, 16.384], [12, 4 * 1366 / 1000], [64, 1.024]]
    assert list(dict.fromkeys(reads)) == [(4096, 2, 1), (4096, 2, 3), (4081, 2, 16)]


def test_misaligned_reads_are_of_as_many_floats_as_the_last_one_has(reads):
    found = strides.misaligned([0, 3, 16], 1 << 14, budget_s=0, where="cpu")
    assert found.values.tolist() == [[0, 16.32], [12, 16.32], [64, 16.32]]
    assert set(reads) == {(4080, 1, 1)}


def test_a_rate_counts_all_rounds(monkeypatch):
    """A GPU's launch reads the footprint as often as the rate says, at every stride."""
    calls = []

    def measure(run, nbytes, **_):
        calls.append((nbytes, run))
        return type("Measurement", (), {"gb_per_s": 1.0})

    class OnGPU(torch.Tensor):
        is_cuda = True

    x = torch.rand(1 << 14).as_subclass(OnGPU)
    launches = []
    monkeypatch.setattr(strides, "measure", measure)
    monkeypatch.setattr(strides, "_numbers", lambda *_: x)
    monkeypatch.setattr(
        strides, "strided_launch", lambda x, n, s, offset, rounds: launches.append((n, s, rounds))
    )
    strides.strides((1, 8, 32), where="cpu", rounds=5)
    assert launches == [(1 << 14, 1, 5), (1 << 11, 8, 5), (1 << 9, 32, 20)]
    assert [nbytes for nbytes, _ in calls] == [4 * n * rounds for n, _, rounds in launches]
    launches.clear()
    strides.strides((1, 32), where="cpu")
    assert launches == [(1 << 14, 1, 1), (1 << 9, 32, 1)]


@pytest.mark.parametrize(
    "n, rounds, blocks",
    [
        (1 << 20, 1, 8),  # as many as 2 SMs of 2,048 threads hold
        (10_000, 1, 4),  # four reads a thread
        (10_000, 4, 8),  # in four rounds
        (100, 1, 1),
    ],
)
def test_a_gpu_holds_all_blocks_at_once_and_each_has_enough_to_read(monkeypatch, n, rounds, blocks):
    class OnGPU(torch.Tensor):
        is_cuda = True

    two_sms = types.SimpleNamespace(max_threads_per_multi_processor=2048, multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: two_sms)
    launched = []
    monkeypatch.setattr(strides.cuda, "load", lambda *_: lambda *sizes: launched.append(sizes))
    strides.strided_launch(torch.zeros(n).as_subclass(OnGPU), n, 1, rounds=rounds)()
    assert [sizes[:2] for sizes in launched] == [(blocks, strides.BLOCK)]


def test_vector_widths_of_a_gpu(monkeypatch):
    """One on which a launch's rate is the bytes of a lane's load times the warps."""

    def measure(run, nbytes, **_):
        assert nbytes == 1 << 16
        return types.SimpleNamespace(gb_per_s=run)

    monkeypatch.setattr(strides, "has_cuda", lambda: True)
    monkeypatch.setattr(strides, "_numbers", lambda nbytes, _: torch.zeros(nbytes // 4))
    monkeypatch.setattr(strides, "read_launch", lambda x, warps, lane_bytes: lane_bytes * warps)
    monkeypatch.setattr(strides, "measure", measure)
    found = strides.vector_widths((1, 8), 1 << 16)
    assert found.columns.tolist() == ["lane_bytes", "warps_per_sm", "gb_per_s"]
    assert found.values.tolist() == [[b, w, b * w] for b in (4, 8, 16) for w in (1, 8)]


class Driver:
    """What l2_fetch_granularity asks of cuda.bindings.driver."""

    class CUlimit:
        CU_LIMIT_MAX_L2_FETCH_GRANULARITY = 5

    class CUresult:
        CUDA_SUCCESS = 0

    def __init__(self, able=True):
        self.now, self.able = 64, able

    def status(self):
        return 0 if self.able else type("Status", (), {"name": "CUDA_ERROR_UNSUPPORTED_LIMIT"})

    def cuCtxGetLimit(self, limit):
        assert limit == 5
        return self.status(), self.now

    def cuCtxSetLimit(self, limit, value):
        assert limit == 5
        self.now = min(value, 96)  # a hint, which need not be taken
        return (self.status(),)


@pytest.fixture
def driver(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(strides, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def install(fake):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
        monkeypatch.setattr(bindings, "driver", fake, raising=False)
        return fake

    return install


def test_granularity_is_set_and_put_back(driver):
    fake = driver(Driver())
    for asked, given in ((32, 32), (128, 96)):
        with strides.l2_fetch_granularity(asked) as now:
            assert now == fake.now == given
        assert fake.now == 64
    with pytest.raises(KeyError), strides.l2_fetch_granularity(32):
        raise KeyError
    assert fake.now == 64


def test_granularity_that_cannot_be_set(driver, capsys, monkeypatch):
    with pytest.raises(ValueError, match="32, 64 or 128 bytes, not 16"):
        with strides.l2_fetch_granularity(16):
            pass
    driver(Driver(able=False))
    with cuda.where_possible(), strides.l2_fetch_granularity(32):
        raise AssertionError
    assert "CUDA_ERROR_UNSUPPORTED_LIMIT" in capsys.readouterr().out
    driver(None)  # what Python takes for a module that is not there
    monkeypatch.delattr("cuda.bindings.driver")
    with pytest.raises(Unsupported, match="needs cuda-bindings"):
        with strides.l2_fetch_granularity(32):
            pass


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_granularity_without_a_gpu():
    with pytest.raises(Unsupported, match="is set on a GPU, and there is none"):
        with strides.l2_fetch_granularity(32):
            pass


@on_gpu
def test_granularity_of_this_gpu():
    with cuda.where_possible(), strides.l2_fetch_granularity(32) as now:
        assert now in strides.GRANULARITIES or now > 0
