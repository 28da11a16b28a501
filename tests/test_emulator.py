"""Kernels that are right, by value; counts and faults have files of their own."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulation import needs_emulator

from helpers import cache, emulator
from helpers.emulator import build

pytestmark = needs_emulator
INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;"


def number(value) -> ctypes._SimpleCData:
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


def kernel(body: str, parameters="const float* x, float* y, int n", before="") -> str:
    return f'{before}\nextern "C" __global__ void k({parameters}) {{ {INDEX}\n{body}\n}}\n'


def run(body, x, y, *, block=32, grid=1, n=None, **options):
    text = kernel(body, **{k: options.pop(k) for k in ("parameters", "before") if k in options})
    arguments = {"x": x, "y": y, "n": number(x.numel() if n is None else n)}
    return emulator.run(text, "k", grid, block, arguments, **options)


def link_runtime(folder: Path, parts: str = "") -> None:
    """Puts the compiled runtime, or some of its parts, into a cache: g++ takes seconds for it."""
    run("y[i] = x[i];", floats(1), torch.zeros(1), block=1)  # now it is in the cache of all tests
    name = build._header(build._compiler()).name
    folder.mkdir(parents=True)
    for path in cache.folder("emulator").glob(f"{name}{parts}"):
        (folder / path.name).symlink_to(path)


def floats(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


GELU = """if (i < n) {
  float v = x[i];
  y[i] = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
}"""


@pytest.mark.parametrize("order", ["forward", "reverse", 0, 7])
def test_gelu_and_its_traffic(order):
    x, y = floats(1000), torch.zeros(1000)
    counts = run(GELU, x, y, block=128, grid=8, order=order)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh"))
    assert (counts.loads, counts.stores) == (1000, 1000)
    assert (counts.bytes_read, counts.bytes_written) == (4000, 4000)
    assert counts.load_requests == counts.store_requests == 32  # 31 warps and one of 8 lanes
    assert counts.load_sectors == counts.store_sectors == 125
    assert counts.load_lines == 32


TILED = """
constexpr int T = 16;
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float as[T][T], bs[T][T];
  int row = blockIdx.y * T + threadIdx.y, col = blockIdx.x * T + threadIdx.x;
  float sum = 0;
  for (int start = 0; start < k; start += T) {
    int x = start + threadIdx.x, y = start + threadIdx.y;
    as[threadIdx.y][threadIdx.x] = row < m && x < k ? a[row * k + x] : 0.0f;
    bs[threadIdx.y][threadIdx.x] = y < k && col < n ? b[y * n + col] : 0.0f;
    __syncthreads();
    for (int i = 0; i < T; i++) sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
    __syncthreads();
  }
  if (row < m && col < n) c[row * n + col] = sum;
}
"""


@pytest.mark.parametrize("order", ["forward", "reverse", 5])
@pytest.mark.parametrize("m, n, k", [(32, 32, 32), (17, 35, 50), (1, 1, 1)])
def test_tiled_matmul(m, n, k, order):
    a, b, c = floats(m * k).view(m, k), floats(k * n).view(k, n), torch.zeros(m, n)
    grid = (-(-n // 16), -(-m // 16))
    arguments = {"a": a, "b": b, "c": c, "m": number(m), "n": number(n), "k": number(k)}
    counts = emulator.run(TILED, "matmul", grid, (16, 16), arguments, order=order)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    blocks, steps = grid[0] * grid[1], -(-k // 16)
    assert counts.barriers == 2 * blocks * steps
    assert counts.shared_loads == blocks * 256 * 32 * steps
    assert counts.shared_stores == blocks * 256 * 2 * steps
    assert counts.shared_requests == blocks * 8 * 34 * steps
    assert counts.bank_conflicts == 0
    assert counts.stores == m * n


SHUFFLES = """
float v = x[i];
float sum = v;
for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
int lane = threadIdx.x % 32;
double wide = __shfl_sync(0xffffffff, (double)v, 3);
long long up = __shfl_up_sync(0xffffffff, (long long)i, 1);
unsigned down = __shfl_down_sync(0xffffffff, (unsigned)i, 1, 8);
unsigned votes = __ballot_sync(0xffffffff, i % 3 == 0);
int any = __any_sync(0xffffffff, lane == 40), all = __all_sync(0xffffffff, lane < 32);
float* row = y + i * 7;
row[0] = sum; row[1] = wide; row[2] = up; row[3] = down; row[4] = __popc(votes);
row[5] = any; row[6] = all;
"""


@pytest.mark.parametrize("order", ["forward", 3])
def test_shuffles_and_votes(order):
    x, y = torch.arange(32.0), torch.zeros(32, 7)
    counts = run(SHUFFLES, x, y, order=order)
    i = torch.arange(32)
    assert y[:, 0].tolist() == [496] * 32 and y[:, 1].tolist() == [3] * 32
    assert y[:, 2].equal((i - 1).clamp(min=0).float())
    assert y[:, 3].equal(torch.where(i % 8 == 7, i, i + 1).float())
    assert y[:, 4].tolist() == [11] * 32
    assert y[:, 5].tolist() == [0] * 32 and y[:, 6].tolist() == [1] * 32
    assert counts.shuffles == 8


def test_atomics():
    body = """__shared__ int s; if (threadIdx.x == 0) s = 0; __syncthreads();
    atomicAdd(&s, i); atomicMax((int*)y + 1, i); __syncthreads();
    if (threadIdx.x == 0) atomicAdd((int*)y, s);"""
    y = torch.zeros(2, dtype=torch.int32)
    counts = run(body, floats(1), y, block=64, grid=4, order=1)
    assert y.tolist() == [sum(range(256)), 255]
    assert counts.atomics == 256 + 256 + 4 and (counts.loads, counts.stores) == (0, 0)


def test_dynamic_shared_memory_and_two_views_of_one_storage():
    body = """extern __shared__ __align__(16) float s[];
    s[threadIdx.x] = x[i]; __syncthreads(); y[i] = s[blockDim.x - 1 - threadIdx.x];"""
    x = floats(64)
    expected = x.view(2, 32).flip(1).flatten()
    run(body, x, x, grid=2, shared_bytes=128)  # in place
    assert x.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_floats_round_to_nearest_even(dtype):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)  # every value
    scale = torch.tensor([3.0, 1 / 3, 1e-5, 1e5])
    y = torch.zeros(4, 1 << 16, dtype=dtype)
    name = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}[dtype]
    body = "for (int j = 0; j < 4; j++) y[j * n + i] = (scalar)((float)x[i] * factor[j]);"
    arguments = {"x": x, "factor": scale, "y": y, "n": number(1 << 16)}
    text = kernel(body, "const scalar* x, const float* factor, scalar* y, int n")
    emulator.run(text, "k", 128, 512, arguments, defines={"scalar": name, "T": "float"})
    torch.testing.assert_close(
        y, (x.float() * scale[:, None]).to(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_pairs_of_halves():
    body = """const __half2* in = (const __half2*)x; __half2 v = in[i];
    float2 f = __half22float2(__hadd2(v, __floats2half2_rn(1.0f, 2.0f)));
    ((float2*)y)[i] = make_float2(f.x, f.y);"""
    x, y = floats(64).half(), torch.zeros(64)
    counts = run(body, x, y, before="#include <cuda_fp16.h>")
    assert y.view(-1, 2).equal((x.view(-1, 2) + torch.tensor([1, 2]).half()).float())
    assert (counts.loads, counts.bytes_read, counts.bytes_written) == (32, 128, 256)


def test_arithmetic_is_cuda_s():
    body = """double a[] = {max(-1, 2u), min(3, 4.5f), tanh(0.5f), tanh(0.5), rsqrtf(4.0f),
    (double)__float_as_int(1.0f), (double)__clz(1), (double)sizeof(tanh(x[0])), __expf(1.0f),
    (double)warpSize, (double)table[2], __fdividef(1.0f, 4.0f), (double)(clock64() < clock64())};
    for (int j = 0; j < 13; j++) y[j] = a[j];"""
    y = torch.zeros(13, dtype=torch.float64)
    run(body, floats(1), y, block=1, parameters="const float* x, double* y, int n",
        before="__constant__ int table[3] = {5, 6, 7};")  # fmt: skip
    f32 = torch.tensor(0.5).tanh().item()
    expected = [2**32 - 1, 3, f32, 0.46211715726000975, 0.5, 0x3F800000, 31, 4, 2.7182817459106445]
    assert y.tolist() == pytest.approx([*expected, 32, 7, 0.25, 1], rel=1e-7)


def test_templates_of_device_functions_and_three_dimensions():
    before = """template <int N, typename T> __device__ T reversed(T v) {
      __shared__ T s[N]; int t = threadIdx.x + blockDim.x * threadIdx.y;
      s[t] = v; __syncthreads(); return s[N - 1 - t]; }"""
    body = """int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    y[b * 8 + t] = reversed<8>(x[b * 8 + t]);"""
    x, y = floats(192), torch.zeros(192)
    run(body, x, y, grid=(2, 3, 4), block=(4, 2), before=before)
    assert y.equal(x.view(-1, 8).flip(1).flatten())


def test_no_elements_and_many():
    run(GELU, torch.zeros(0), torch.zeros(0))
    x, y = floats(1 << 20), torch.zeros(1 << 20)
    assert run("if (i < n) y[i] = x[i];", x, y, n=5).stores == 5
    assert y[:5].equal(x[:5]) and not y[5:].any()


def test_two_processes_with_a_cold_cache(tmp_path):
    # The kernel, the header and one part of the runtime are enough to meet at.
    link_runtime(tmp_path / "emulator", "-[cmsw]*.o")
    code = f"""import sys, torch; sys.path[:0] = {sys.path!r}
from tests.test_emulator import run, GELU, floats
y = torch.zeros(8); run(GELU, floats(8), y); print(y.sum().item())"""
    environment = {**os.environ, "LECTURES_CACHE": str(tmp_path)}
    root = os.path.dirname(os.path.dirname(__file__))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, cwd=root, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs[0] == outputs[1] != b"" and all(p.returncode == 0 for p in processes)
    assert len(list((tmp_path / "emulator").glob("*.so"))) == 1
    assert not list((tmp_path / "emulator").glob(".*"))
