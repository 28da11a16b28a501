"""CUDA's functions and types, each against PyTorch, NumPy or a value worked out by hand."""

import numpy
import pytest
import torch
from emulation import needs_emulator

from helpers import emulator
from tests.test_emulator import floats, run

pytestmark = needs_emulator


def doubles(body: str, columns: int, threads: int = 64, **options) -> torch.Tensor:
    """What `body` leaves in `double o[columns]`, (threads, columns)."""
    y = torch.zeros(threads, columns, dtype=torch.float64)
    body = f"double* o = y + i * {columns};\n{body}"
    run(body, floats(1), y, block=threads, parameters="float* x, double* y, int n", **options)
    return y


def test_votes_of_a_block_and_reductions_of_a_warp():
    body = """o[0] = __syncthreads_count(i % 3 == 0);
    o[1] = __syncthreads_and(i < 64) + 2 * __syncthreads_and(i < 63);
    o[2] = (__syncthreads_or(i == 63) != 0) + 2 * __syncthreads_or(i > 63);
    int lane = i % 32;
    o[3] = __reduce_add_sync(~0u, lane - 20);
    o[4] = __reduce_min_sync(~0u, lane - 20); o[5] = __reduce_max_sync(~0u, lane - 20);
    o[6] = __reduce_min_sync(~0u, unsigned(lane - 20));
    o[7] = __reduce_max_sync(~0u, unsigned(lane - 20));
    o[8] = __reduce_and_sync(~0u, 0xf0u | lane); o[9] = __reduce_or_sync(~0u, 1u << lane / 2);
    o[10] = __reduce_xor_sync(~0u, unsigned(lane == 5) * 77);
    if (lane < 4) o[11] = __reduce_add_sync(0xf, lane);"""
    # One line has one barrier here: two on a line would be taken for one.
    body = body.replace(" + 2 *", "\n + 2 *").replace("; o[", ";\no[")
    y = doubles(body, 12)
    values = torch.arange(32) - 20
    unsigned = [0, 2**32 - 1]
    expected = [22, 1, 1, values.sum(), -20, 11, *unsigned, 0xF0, 0xFFFF, 77]
    assert y[:, :11].tolist() == [[float(v) for v in expected]] * 64
    assert y[:, 11].tolist() == ([6.0] * 4 + [0.0] * 28) * 2


def test_shuffles_of_a_part_of_the_warp():
    body = """o[0] = __shfl_up_sync(~0u, i, 3, 8); o[1] = __shfl_xor_sync(~0u, i, 5, 8);
    o[2] = __shfl_xor_sync(~0u, i, 16, 16);
    o[3] = __shfl_sync(~0u, i, 19, 16); o[4] = __shfl_down_sync(~0u, i, 9, 16);"""
    i = torch.arange(32)
    up = torch.where(i % 8 < 3, i, i - 3)
    # An exchange with a later part gives the lane's own value, one with an earlier part works.
    later = torch.where(i < 16, i, i - 16)
    down = torch.where(i % 16 >= 7, i, i + 9)
    expected = [up, i ^ 5, later, i // 16 * 16 + 3, down]
    assert doubles(body.replace("; o[", ";\no["), 5, 32).equal(torch.stack(expected, 1).double())


def test_atomics_that_wrap_and_those_of_16_bits():
    body = """__shared__ unsigned up, down; __shared__ __half h; __shared__ __nv_bfloat162 b;
    if (i == 0) { up = 0; down = 2; h = 0.5f; b = {1.0f, 2.0f}; }
    __syncthreads();
    atomicInc(&up, 6); atomicDec(&down, 4); atomicAdd(&h, __half(2.0f));
    atomicAdd(&b, __nv_bfloat162(1.0f, 2.0f));
    __syncthreads();
    o[0] = up; o[1] = down; o[2] = h; o[3] = b.x; o[4] = b.y;"""
    assert doubles(body, 5)[0].tolist() == [64 % 7, (2 - 64) % 5, 128.5, 65, 130]


FLOATS = [0.5, 1.5, -1.5, -0.5, 3e9, -3e9, 5e9, 2e19, -2e19, float("inf"), float("nan"), 16777217]


@pytest.mark.parametrize("kind", ["float", "double"])
def test_conversions_to_integers_saturate(kind):
    x = torch.tensor(FLOATS, dtype=getattr(torch, kind + "32" if kind == "float" else "float64"))
    names = {"int": (31, True), "uint": (32, False), "ll": (63, True), "ull": (64, False)}
    modes = {"rn": torch.round, "rz": torch.trunc, "rd": torch.floor, "ru": torch.ceil}
    cells = [
        f"y[{4 * j + k} * n + i] = __{kind}2{to}_{mode}(x[i]);\n"
        for j, to in enumerate(names)
        for k, mode in enumerate(modes)
    ]
    y = torch.zeros(16, len(x), dtype=torch.float64)
    run("".join(cells), x, y, block=len(x), parameters=f"const {kind}* x, double* y, int n")
    for j, (bits, signed) in enumerate(names.values()):
        low, high = (-(2**bits) if signed else 0), 2**bits - 1
        # PTX ISA, cvt: NaN becomes 0, or with 64 bits on either side the top bit.
        nan = 0 if bits < 33 and kind == "float" else low if signed else 2 ** (bits - 1)
        for k, mode in enumerate(modes.values()):
            wanted = [nan if v != v else min(max(v, low), high) for v in mode(x.double()).tolist()]
            assert y[4 * j + k].tolist() == [float(v) for v in wanted], (bits, mode)


def test_doubles_and_integers_are_rounded_once():
    generator = torch.Generator().manual_seed(1)
    halfway = torch.randint(1024, 2048, (64,), generator=generator).double() + 0.5
    tiny = 2.0 ** -torch.arange(1, 65).double() * torch.tensor([1.0, -1.0]).repeat(32)
    x = torch.cat([halfway + tiny, (halfway + tiny) * 2.0**-34, torch.tensor([1e300, -65519.99])])
    y = torch.zeros(len(x), dtype=torch.float16)
    run("y[i] = __double2half(x[i]);", x, y, block=len(x),
        parameters="const double* x, __half* y, int n")  # fmt: skip
    with numpy.errstate(over="ignore"):
        assert (y.numpy() == x.numpy().astype(numpy.float16)).all()
    # Just above the middle between 2^24 and 2^24 + 2^17; a float does not hold the last bit.
    body = "o[0] = __int2bfloat16_rn((1 << 24) + (1 << 16) + n); o[1] = __double2bfloat16(x[0]);"
    body = body.replace("x[0]", "1 + ldexp(1.0, -8) + ldexp(1.0, -40)").replace("+ n", "+ 1")
    assert doubles(body, 2, 1).tolist() == [[2**24 + 2**17, 1 + 2**-7]]


def test_bits_comparisons_and_caching_hints():
    body = """o[0] = __ffs(n); o[1] = __ffsll(1ll << 40); o[2] = __brev(1u); o[3] = __brevll(2ull);
    __half a = 1.0f, b = 2.0f, c = CUDART_NAN_F;
    o[4] = __heq(a, a) + 2 * __hne(a, b) + 4 * __hlt(a, b) + 8 * __hle(a, a) + 16 * __hge(b, a);
    o[5] = __heq(c, c) + 2 * __hne(c, c) + 4 * __hle(a, c) + 8 * __hge(a, c) + 16 * __hgt(a, b);
    half2 p = {a, b}; p += half2(b, b); p *= half2(a, b); p = __hmax2(p, half2(b, b));
    o[6] = p.x; o[7] = p.y; o[8] = __hmin2(p, half2(a, a)).y;
    __stcs(o + 9, __ldcs(x) + __ldcg(x) + __ldca(x)); o[10] = clock() < clock();
    float sine, cosine; __sincosf(2.0f, &sine, &cosine); o[11] = sine; o[12] = cosine;
    __threadfence_system(); assert(n == 1);"""
    y = doubles(body, 13, 1, before="#include <assert.h>", n=1)[0]
    assert y[:9].tolist() == [1, 41, 2**31, 2**62, 31, 2, 3, 8, 1]
    assert y[9].item() == pytest.approx(3 * floats(1).item()) and y[10] == 1
    assert y[11:].tolist() == pytest.approx([0.9092974268, -0.4161468365])


def test_vectors():
    body = """float4 v = {1.f}; float2 w = {2.f}; uchar4 u = make_uchar4(1, 2, 3, 4); float4 z = {};
    short2 s = {5, 6}; uint3 t = make_uint3(7, 8, 9); double4 d = {1, 2, 3, 4}, e = d;
    longlong2 l = {1ll << 40}; uchar4 u2 = u;
    o[0] = v.x + 10 * v.w + 100 * w.x + 1000 * w.y; o[1] = u2.w; o[2] = s.y; o[3] = t.z; o[4] = e.w;
    o[5] = l.x; o[6] = z.w; o[7] = sizeof(double4) + sizeof(uchar4) + alignof(double4);"""
    assert doubles(body, 8, 1)[0].tolist() == [201, 4, 6, 9, 4, 2**40, 0, 32 + 4 + 16]


FORMS = [
    "static __shared__ float s[32];", "extern volatile __shared__ float s[];",
    "extern __align__(16) __shared__ float s[];", "__shared__ extern float s[];",
    "extern __shared__ volatile float s[];", "volatile __shared__ float s[32];",
]  # fmt: skip


def test_forms_of_shared_memory_and_of_kernels():
    kernels = "".join(
        f"""__global__ void k{j}(const float* x, float* y) {{
        {form} int i = threadIdx.x; s[i] = x[i];
        __shared__ char much[30000]; much[i] = 0; __syncthreads(); y[i] = s[31 - i] + much[0]; }}
        """
        for j, form in enumerate(FORMS)
    )
    text = f'extern "C" {{\n{kernels}}}'
    x = floats(32)
    for j in range(len(FORMS)):  # 48 KB would not hold them all
        y = torch.zeros(32)
        counts = emulator.run(text, f"k{j}", 1, 32, {"x": x, "y": y}, shared_bytes=128)
        assert y.equal(x.flip(0)) and counts.shared_stores == 64
