"""The profiler's tables, the kernel-name decoder and the flame graph.

GPU captures are hand-made traces with round numbers, so that every expected value can be worked
out on paper; the captures of real runs are of whatever machine runs the tests.
"""

import gzip
import json
import types

import pytest
import torch

from helpers import flame, profiling, stacks
from helpers.kernel_names import KernelName, decode, short
from helpers.profiling import Capture


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>(x)"
GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
SHAPE = {"grid": [8, 4, 1], "block": [256, 1, 1]}


def gpu_capture() -> Capture:
    """Forward on thread 1 (add, matmul), backward on thread 2; two more kernels lack a launch."""
    return Capture(
        averages=[],
        trace={
            "traceEvents": [
                {"ph": "M", "name": "process_name"},
                event("python_function", "ipykernel/kernelapp.py(1): start", 900.0, 500.0),
                event("user_annotation", "run", 1000.0, 300.0),
                event("python_function", "/tmp/ipykernel_7/1.py(3): step", 1000.0, 290.0),
                event("python_function", "nn.Module: Linear_0", 1010.0, 80.0),
                event("python_function", "torch/nn/modules/module.py(9): _call_impl", 1011.0, 78.0),
                event("cpu_op", "aten::add", 1012.0, 20.0, **{"External id": 5}),
                event("cuda_runtime", "cudaLaunchKernel", 1015.0, 10.0, correlation=1),
                event("cpu_op", "aten::mm", 1040.0, 40.0, **{"External id": 6}),
                event("cpu_op", "aten::empty", 1042.0, 4.0),
                event("cuda_driver", "cuLaunchKernel", 1050.0, 10.0, correlation=2),
                event("cuda_runtime", "cudaDeviceSynchronize", 1240.0, 50.0, correlation=9),
                event("cpu_op", stacks.BACKWARD + "MmBackward0", 1100.0, 100.0, tid=2),
                event("cpu_op", "aten::mm", 1120.0, 40.0, tid=2),
                event("cuda_driver", "cuLaunchKernel", 1130.0, 10.0, tid=2, correlation=3),
                event("python_function", "zmq.py(1): poll", 1000.0, 300.0, tid=3),
                event("kernel", GEMM, 1065.0, 60.0, tid=7, correlation=2, stream=7),
                event("kernel", GEMM, 1140.0, 70.0, tid=7, correlation=3, stream=7),
                event(
                    "kernel", ADD, 1025.0, 30.0, tid=7, correlation=1, stream=7,
                    **SHAPE, **{"registers per thread": 32, "shared memory": 1024},
                ),
                event("kernel", "found_by_op", 1215.0, 5.0, tid=7, **{"External id": 6}),
                event("gpu_memset", "Memset (Device)", 1220.0, 2.0, tid=7, correlation=77),
            ]
        },
    )  # fmt: skip


# ---- accessors and tables


@pytest.mark.case("M08")
@pytest.mark.parametrize("prefix", ["device", "cuda"])
def test_device_time_reads_both_attribute_names(prefix):
    fields = {f"{prefix}_time_total": 12.5, f"self_{prefix}_time_total": 2}
    old_or_new = types.SimpleNamespace(**fields)
    assert profiling.device_time_us(old_or_new) == 12.5
    assert profiling.device_time_us(old_or_new, own=True) == 2.0


def test_device_time_of_something_else_is_an_error():
    with pytest.raises(AttributeError, match="device_time_total"):
        profiling.device_time_us(types.SimpleNamespace(time=1))


def test_operations_on_a_gpu_trace():
    def average(key, count, cpu, gpu):
        return types.SimpleNamespace(
            key=key, count=count, self_cpu_time_total=cpu, self_cuda_time_total=gpu
        )

    capture = gpu_capture()
    averages = [
        average("run", 1, 300, 165),
        average("aten::add", 1, 10, 30),
        average("aten::mm", 2, 60, 130),
        average("cuLaunchKernel", 2, 20, 0),
        average(GEMM, 2, 0, 130),
        average(ADD, 1, 0, 30),
    ]
    table = profiling.operations(Capture(averages, capture.trace))
    assert table["name"].tolist() == [
        "aten::mm",
        "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        "aten::add",
        "vectorized_elementwise_kernel<4> add",
        "cuLaunchKernel",
    ]
    assert table["kind"].tolist() == ["operator", "kernel", "operator", "kernel", "CUDA call"]
    assert table["share (%)"].tolist() == [81.25, 81.25, 18.75, 18.75, 0.0]
    assert len(profiling.operations(Capture(averages, capture.trace), limit=2)) == 2
    with pytest.raises(ValueError, match="limit"):
        profiling.operations(capture, limit=0)


def test_kernels_in_launch_order():
    table = profiling.kernels(gpu_capture())
    assert table["name"].tolist() == [
        "vectorized_elementwise_kernel<4> add",
        "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        "found_by_op",
        "Memset (Device)",
    ]
    assert table["launch_us"].tolist()[:3] == [0.0, 35.0, 115.0]
    assert table["launch_us"].isna().tolist() == [False, False, False, True, True]
    assert table["start_us"].tolist() == [10.0, 50.0, 125.0, 200.0, 205.0]
    assert table["queue_us"].tolist()[:3] == [10.0, 15.0, 10.0]
    assert table["duration_us"].tolist() == [30.0, 60.0, 70.0, 5.0, 2.0]
    first = table.iloc[0]
    assert (first["grid"], first["block"]) == ((8, 4, 1), (256, 1, 1))
    assert (first["registers"], first["shared_bytes"], first["stream"]) == (32, 1024, 7)
    assert first["full_name"] == ADD
    assert profiling.kernel_time_us(gpu_capture()) == 167.0


def test_host_timeline():
    table = profiling.host_timeline(gpu_capture())
    host = table[table["lane"] == "host"]
    assert host["name"].tolist() == [
        "cudaLaunchKernel",
        "cuLaunchKernel",
        "cuLaunchKernel",
        "cudaDeviceSynchronize",
    ]
    assert host["start_us"].tolist() == [0.0, 35.0, 115.0, 225.0]
    assert host["end_us"].tolist() == [10.0, 45.0, 125.0, 275.0]
    device = table[table["lane"] == "device"]
    assert device["start_us"].tolist() == [10.0, 50.0, 125.0, 200.0, 205.0]
    assert device["end_us"].tolist() == [40.0, 110.0, 195.0, 205.0, 207.0]
    assert table["start_us"].is_monotonic_increasing


def test_tables_without_a_gpu_have_the_same_columns():
    empty = Capture([], {"traceEvents": []})
    for table in (profiling.kernels, profiling.host_timeline):
        assert len(table(empty)) == 0
        assert table(empty).columns.tolist() == table(gpu_capture()).columns.tolist()
    assert profiling.kernel_time_us(empty) is None
    assert profiling.operations(empty).empty


# ---- captures of real runs


@pytest.fixture(scope="module")
def mlp_capture() -> Capture:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [torch.nn.Linear(32, 32, device=device) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(16, 32, device=device)

    def step():
        with profiling.annotate("forward"):
            loss = model(x).sum()
        loss.backward()

    return profiling.capture(step, with_stack=True)


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda x: x + x, "aten::add"),
        (lambda x: x @ x, "aten::mm"),
        (lambda x: torch.softmax(x, dim=-1), "aten::_softmax"),
    ],
    ids=["add", "matmul", "softmax"],
)
def test_capture_of_one_operation(run, operator):
    x = torch.ones(64, 64)
    calls = []
    capture = profiling.capture(lambda: calls.append(run(x)), warmups=2)
    assert len(calls) == 2 + 1 + 1  # asked for, discarded by the profiler, profiled
    table = profiling.operations(capture, limit=50).set_index("name")
    assert table.loc[operator, "calls"] == 1, "the warm-ups are not in the table"
    assert table.loc[operator, "CPU own (µs)"] > 0
    assert table["share (%)"].sum() == pytest.approx(100)
    assert not [name for name in table.index if name.startswith(("run", "ProfilerStep"))]
    assert "GPU own (µs)" not in table.columns
    assert profiling.kernels(capture).empty


def test_capture_of_an_mlp(mlp_capture):
    table = profiling.operations(mlp_capture, limit=100).set_index("name")
    assert table.loc["aten::addmm", "calls"] == 3
    assert stacks.BACKWARD + "AddmmBackward0" in table.index
    assert "forward" not in table.index, "a range is not an operator"
    assert any(e["name"] == "forward" for e in mlp_capture.events)


def test_a_range_named_like_an_operator_does_not_hide_it():
    x = torch.ones(16, 16)

    def run():
        with profiling.annotate("aten::mm"):
            return x @ x

    assert "aten::mm" in profiling.operations(profiling.capture(run), limit=50)["name"].tolist()


@pytest.mark.case("M07")
def test_capture_asks_only_for_supported_activities(monkeypatch):
    """Case M07: a build that lists one activity still gives a table."""
    asked = []
    real = torch.profiler.profile

    def profile(*, activities, **options):
        asked.extend(activities)
        return real(activities=activities, **options)

    only_cpu = {torch.profiler.ProfilerActivity.CPU}
    monkeypatch.setattr(profiling.profiler, "supported_activities", lambda: only_cpu)
    monkeypatch.setattr(profiling.profiler, "profile", profile)
    capture = profiling.capture(lambda: torch.ones(4) + 1)
    assert set(asked) == only_cpu
    assert "aten::add" in profiling.operations(capture, limit=50)["name"].tolist()


def test_capture_refuses_negative_warmups_and_passes_errors_on():
    with pytest.raises(ValueError, match="warmups"):
        profiling.capture(lambda: None, warmups=-1)
    with pytest.raises(ZeroDivisionError):
        profiling.capture(lambda: 1 / 0, warmups=0)


def test_capture_warns_when_launches_have_no_kernels(monkeypatch):
    trace = {"traceEvents": [event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=4)]}
    monkeypatch.setattr(profiling.json, "loads", lambda text: trace)
    with pytest.warns(UserWarning, match="CUPTI"):
        profiling.capture(lambda: None)


def test_profiling_writes_nothing(capfd):
    """torch 2.13 writes "USDT: ..." to stderr unless Kineto's log level forbids it."""
    profiling.capture(lambda: torch.ones(2) + 1)
    assert capfd.readouterr() == ("", "")


def test_import_is_light():
    for module in (profiling, flame, stacks):
        assert not {"pd", "pandas", "matplotlib", "plt"} & vars(module).keys()


def test_export_trace(tmp_path, mlp_capture):
    path = profiling.export_trace(mlp_capture, tmp_path / "new" / "mlp.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {"aten::addmm", "forward", "run"} <= {e["name"] for e in spans}
    assert all(e["dur"] >= 0 and e["ts"] > 0 and "tid" in e for e in spans)
    assert "host_name" not in trace
    with pytest.raises(ValueError, match=r"\.json\.gz"):
        profiling.export_trace(mlp_capture, tmp_path / "trace.json")


def test_annotate_opens_an_nvtx_range_on_a_gpu(monkeypatch):
    names = []

    class Range:
        def __init__(self, name):
            names.append(name)

        def __enter__(self):
            names.append("in")

        def __exit__(self, *error):
            names.append("out")

    monkeypatch.setattr(profiling.device, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    with profiling.annotate("step"):
        names.append("body")
    assert names == ["step", "in", "body", "out"]


# ---- kernel names: real names, from profiles in public issues and repositories

UNARY = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 2ul> >"
    "(int, at::native::{}, std::array<char*, 2ul>)"
)
LAMBDA = (
    "(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() const::"
    "{lambda()#2}::operator()() const::{lambda(float)#1}"
)
MUL = "AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >"
F32 = {"dtype_in": "f32", "dtype_accumulate": "f32", "dtype_out": "f32"}
BF16 = {"dtype_in": "bf16", "dtype_accumulate": "f32", "dtype_out": "bf16"}
F16 = {"dtype_in": "f16", "dtype_accumulate": "f32", "dtype_out": "f16"}
NAMES = [
    # The lecture's three.
    (GEMM, {"library": "CUTLASS", "architecture": "sm80", "datapath": "simt", **F32,
            "tile": (256, 128, 8), "stages": 4, "layout": "nn"}),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4"
     "_alignc4_execute_kernel__5x_cublas",
     {"library": "cuBLAS", "architecture": "sm80", "datapath": "simt", **F32,
      "tile": (32, 32, 8), "stages": 3, "layout": "nn", "warps": "1x2x1 warps"}),
    (ADD, {"library": "PyTorch", "operation": "elementwise add", "dtype_in": "f32",
           "vector_width": 4}),
    # cuBLAS and CUTLASS, on CUDA cores and on tensor cores.
    ("ampere_sgemm_128x64_tn", {"library": "cuBLAS", "architecture": "sm80", "datapath": "simt",
                                **F32, "tile": (128, 64, None), "stages": None, "layout": "tn"}),
    ("volta_sgemm_64x64_nn", {"architecture": "sm70", "datapath": "simt", "tile": (64, 64, None)}),
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn",
     {"datapath": "tensorop", **BF16, "tile": (256, 128, 64), "stages": 3, "layout": "nn"}),
    ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x128x32_stage4_warpsize2x2x1"
     "_tensor16x8x16_kernel",
     {"library": "NVIDIA xmma", "datapath": "tensorop", **F16, "tile": (96, 128, 32)}),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"
     "_execute_segment_k_off_kernel__5x_cublas",
     {"architecture": "sm90", "datapath": "wgmma", **BF16, "tile": (128, 128, 64),
      "stages": None, "layout": "tn", "warps": "1x1x1 warpgroups"}),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_warpgroupsize2x1x1"
     "_execute_segment_k_off_kernel__5x_cublas",
     {"datapath": "wgmma", "dtype_in": "tf32", "dtype_accumulate": "f32", "dtype_out": "f32"}),
    ("sm90_xmma_gemm_i8i32_i8i32_i32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
     {"dtype_in": "i8", "dtype_accumulate": "i32", "dtype_out": "i32"}),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
     {"library": "cuBLAS", "architecture": None, "datapath": "tensorop", **BF16,
      "tile": (128, 256, 64), "stages": 4, "layout": "nn", "extra": ("cluster 2x1",)}),
    ("nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_NNT",
     {"architecture": "sm90", "dtype_in": "f16", "dtype_out": "f32", "tile": (320, 128, 64)}),
    ("nvjet_tst_32x128_64x10_1x2_h_bz_splitK_TNN",
     {"stages": 10, "layout": "tn", "extra": ("cluster 1x2", "k split over several blocks")}),
    ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
     {"dtype_in": "fp8", "dtype_accumulate": "f32", "dtype_out": "bf16", "tile": (128, 256, 128)}),
    ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
     {"library": "cuBLAS", "architecture": "sm120", **BF16, "tile": None, "stages": None}),
    ("void cutlass::Kernel2<cutlass_75_tensorop_f16_s1688gemm_f16_256x128_nn_align1>(x)",
     {"architecture": "sm75", "datapath": "tensorop", **F16, "tile": (256, 128, None),
      "stages": None, "layout": "nn", "extra": ("instruction 16x8x8",)}),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(T1::Params)",
     {"datapath": "tensorop", **F32, "tile": (128, 128, 16), "stages": 5,
      "extra": ("instruction 16x8x8", "f32 inputs are rounded to TF32")}),
    ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_1x1x1_0_tnn"
     "_align8_warpspecialized_pingpong_epi_tma",
     {"library": "CUTLASS", "architecture": "sm90", **BF16, "tile": (128, 128, 64),
      "stages": None, "layout": "tnn",
      "extra": ("instruction 64x128x16", "cluster 1x1x1", "pingpong")}),
    ("void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, false, cublasGemvParamsEx"
     "<int, cublasGemvTensorStridedBatched<float const> > >(x)",
     {"library": "cuBLAS", "operation": "matrix times vector", "dtype_in": "f32"}),
    ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 2, 4, false>(x)",
     {"operation": "matrix times vector", "dtype_in": None}),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true>(x)",
     {"library": "cuBLAS", "operation": "sum of the parts of a split-k matrix multiply"}),
    ("void magma_sgemmEx_kernel<float, float, float, false, true, 6, 4, 6, 3, 4>(int)",
     {"library": "cuBLAS", "operation": "matrix multiply", "datapath": None}),
    # PyTorch.
    (UNARY.format("GeluCUDAKernelImpl" + LAMBDA, "GeluCUDAKernelImpl" + LAMBDA),
     {"operation": "elementwise gelu", "dtype_in": "f32", "vector_width": 4}),
    (UNARY.format(MUL, MUL), {"operation": "elementwise mul", "dtype_in": "f32"}),
    ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor"
     "<c10::BFloat16>, std::array<char *, (unsigned long)1>>(int, T2, T3)",
     {"operation": "elementwise fill", "dtype_in": "bf16", "vector_width": 4}),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda"
     "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}, x>(int)",
     {"operation": "elementwise direct copy", "dtype_in": None, "vector_width": None}),
    ("void at::native::elementwise_kernel<128, 4, void at::native::gpu_kernel_impl_nocast<"
     "at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::"
     "binary_internal::MulFunctor<float>>>(at::TensorIteratorBase &)::[lambda(int)]>(int, T3)",
     {"operation": "elementwise mul", "dtype_in": "bf16", "vector_width": None}),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
     "func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()"
     "(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(x)",
     {"library": "PyTorch", "operation": "reduction sum", **F32,
      "extra": ("at most 512 threads per block",)}),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float, float, "
     "at::native::(anonymous namespace)::SoftMaxForwardEpilogue, long>(float*)",
     {"operation": "softmax forward", **F32, "vector_width": 4,
      "extra": ("a block holds its row in shared memory",)}),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half, float, c10::Half, "
     "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(c10::Half*)",
     {"operation": "log softmax forward", **F16, "vector_width": 8, "extra": ()}),
    ("void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 7, false, "
     "false>(c10::Half*)",
     {"operation": "softmax forward", **F16, "vector_width": None,
      "extra": ("a warp holds its rows in registers", "rows of up to 128 elements")}),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<x, 3>(char*)",
     {"library": "PyTorch", "operation": "concatenate"}),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
     {"operation": "layer norm"}),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
     "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
     "FusedAdamMathFunctor<float, float, 4> >(x)",
     {"operation": "one launch over a list of tensors: fused adam math"}),
    # Others.
    ("Memcpy DtoD (Device -> Device)", {"library": "CUDA", "operation": "copy device to device"}),
    ("Memset (Device)", {"library": "CUDA", "operation": "fill memory"}),
    ("triton_poi_fused_add_mul_tanh_0",
     {"library": "TorchInductor (Triton)", "operation": "fused pointwise: add_mul_tanh"}),
    ("triton_per_fused__softmax_1", {"operation": "fused persistent reduction: _softmax"}),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
     "cutlass::bfloat16_t, Flash_kernel_traits<128> >, false>(x)",
     {"library": "FlashAttention", "operation": "attention forward", "dtype_in": "bf16",
      "tile": (128, 64, None), "warps": "4 warps", "extra": ("head size 128",)}),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0",
     {"library": "cuDNN", "operation": "attention backward", "architecture": "sm90",
      "datapath": "wgmma", "tile": (64, 64, None), "dtype_in": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=[short(name, 40) for name, _ in NAMES])
def test_decode(name, expected):
    decoded = decode(name)
    assert {field: getattr(decoded, field) for field in expected} == expected
    sentence = decoded.sentence()
    assert sentence.startswith(decoded.library) and sentence.endswith(".")
    assert "None" not in sentence


@pytest.mark.parametrize(
    "name",
    ["", "void", "my_kernel", "softmax_rows_kernel", "nvjet", "<>", "Memcpy", "cutlass_80_simt_"],
)
def test_unknown_names_decode_to_nothing(name):
    assert decode(name) == KernelName()
    assert decode(name).sentence() == "A name that follows no pattern decoded here."


def test_sentence_says_what_the_lecture_says():
    assert decode(GEMM).sentence() == (
        "CUTLASS: matrix multiply on ordinary CUDA cores, not tensor cores; built for sm80; "
        "f32 in, accumulated in f32, f32 out; a 256x128 tile per block in steps of k = 8; "
        "4 stages; layout nn."
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"),
        (ADD, "vectorized_elementwise_kernel<4> add"),
        (UNARY.format(MUL, MUL), "vectorized_elementwise_kernel<4> mul"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(x)",
            "gemvx::kernel",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x>>>",
            "device_kernel FlashAttnFwdSm90",
        ),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(x)", "softmax_warp_forward"),
        ("my_kernel", "my_kernel"),
        ("", ""),
    ],
)
def test_short(name, expected):
    assert short(name) == expected


def test_short_keeps_to_the_width():
    assert short("a" * 80) == "a" * 59 + "…"
    assert short("abcd", width=4) == "abcd"
    assert short("abcde", width=4) == "abc…"
    with pytest.raises(ValueError, match="width"):
        short("abc", width=1)


# ---- flame graphs


def tree(node) -> dict:
    return {
        child.name: (child.value_us, tree(child)) if child.children else child.value_us
        for child in node.children.values()
    }


SGEMM = "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"


def test_flame_by_device_time():
    root = flame.flame(gpu_capture())
    assert (root.name, root.value_us) == ("run", 167.0)
    linear = {
        "aten::add": (30.0, {"vectorized_elementwise_kernel<4> add": 30.0}),
        "aten::mm": (65.0, {SGEMM: 60.0, "found_by_op": 5.0}),
    }
    assert tree(root) == {
        "step": (95.0, {"Linear": (95.0, linear)}),
        "autograd thread": (
            70.0,
            {stacks.BACKWARD + "MmBackward0": (70.0, {"aten::mm": (70.0, {SGEMM: 70.0})})},
        ),
        "Memset (Device)": 2.0,
    }
    backward = root.children["autograd thread"].children[stacks.BACKWARD + "MmBackward0"]
    assert backward.children["aten::mm"].kind == "backward"
    assert backward.children["aten::mm"].children[SGEMM].kind == "kernel"
    assert root.children["step"].children["Linear"].children["aten::mm"].kind == "operator"


def test_flame_by_host_time():
    root = flame.flame(gpu_capture(), weight="cpu")
    assert root.value_us == 400.0, "the run, and the other thread's work"
    assert tree(root) == {
        "step": (
            290.0,
            {"Linear": (80.0, {"aten::add": 20.0, "aten::mm": (40.0, {"aten::empty": 4.0})})},
        ),
        "autograd thread": (
            100.0,
            {stacks.BACKWARD + "MmBackward0": (100.0, {"aten::mm": 40.0})},
        ),
    }


def test_flame_without_the_run_marker_sums_the_root_intervals():
    events = [
        event("cpu_op", "a", 0.0, 10.0),
        event("cpu_op", "b", 2.0, 9.0),  # seems to outlast its caller by 1
        event("cpu_op", "a", 20.0, 5.0),
        event("cpu_op", "c", 3.0, 4.0, tid=2),
    ]
    root = flame.flame(Capture([], {"traceEvents": events}))
    assert root.value_us == 19.0
    assert tree(root) == {"a": (15.0, {"b": 8.0}), "c": 4.0}


def test_flame_lets_a_range_outlast_the_call_that_opened_it():
    events = [
        event("python_function", "a.py(1): f", 0.0, 100.0),
        event("python_function", "<built-in function next>", 10.0, 5.0),
        event("user_annotation", "forward", 12.0, 80.0),
        event("cpu_op", "aten::mm", 13.0, 1.0),
        event("cpu_op", "aten::add", 30.0, 20.0),
    ]
    root = flame.flame(Capture([], {"traceEvents": events}))
    forward = (80.0, {"aten::mm": 1.0, "aten::add": 20.0})
    assert tree(root) == {"a.py(1): f": (100.0, {"next": 2.0, "forward": forward})}


def test_flame_hides_the_measurement_itself():
    events = [
        event("python_function", "a.py(1): f", 0.0, 100.0),
        event("python_function", "torch/autograd/profiler.py(9): __enter__", 10.0, 20.0),
        event("python_function", "torch/jit/__init__.py(3): annotate", 12.0, 2.0),
        event("cpu_op", "aten::mm", 40.0, 1.0),
    ]
    root = flame.flame(Capture([], {"traceEvents": events}))
    assert tree(root) == {"a.py(1): f": (100.0, {"aten::mm": 1.0})}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch/nn/modules/linear.py(130): forward", "linear.py(130): forward"),
        ("/home/me/lib/python3.12/site-packages/a.py(3): f", "a.py(3): f"),
        ("C:\\Users\\me\\a.py(3): f", "a.py(3): f"),
        ("/tmp/ipykernel_41/123.py(2): step", "step"),
        ("/tmp/ipykernel_41/123.py(2): <module>", "cell"),
        ("<ipython-input-1-abc>(2): step", "step"),
        ("nn.Module: Linear_12", "Linear"),
        ("<built-in function linear>", "linear"),
        ("<built-in method run_backward of torch._C._EngineBase object at 0x7f>", "run_backward"),
        ("aten::mm", "aten::mm"),
    ],
)
def test_frame_names_have_no_paths(name, expected):
    assert stacks.frame_name(name) == expected


def test_flame_refuses_what_it_cannot_weigh():
    with pytest.raises(ValueError, match="weight"):
        flame.flame(gpu_capture(), weight="time")
    with pytest.raises(ValueError, match="no kernels"):
        flame.flame(Capture([], {"traceEvents": []}), weight="device")


def nodes(node):
    yield node
    for child in node.children.values():
        yield from nodes(child)


@pytest.mark.parametrize("weight", ["cpu", "auto"])
def test_flame_of_a_real_run_adds_up(mlp_capture, weight):
    root = flame.flame(mlp_capture, weight)
    for node in nodes(root):
        callees = sum(child.value_us for child in node.children.values())
        assert callees <= node.value_us * (1 + 1e-9) + 1e-6, node.name
    if weight == "cpu" and not torch.cuda.is_available():
        run = stacks.run_event(mlp_capture)
        assert root.value_us == pytest.approx(run["dur"])
        # No frame is lost: the operators' total is the one that their intervals give.
        for name in ("aten::addmm", stacks.BACKWARD + "AddmmBackward0"):
            direct = sum(e["dur"] for e in mlp_capture.events if e["name"] == name)
            in_tree = sum(node.value_us for node in nodes(root) if node.name == name)
            assert in_tree == pytest.approx(direct, abs=0.05)
    names = {node.name for node in nodes(root)}
    assert {"forward", "Linear", stacks.BACKWARD + "AddmmBackward0"} <= names
    assert not [name for name in names if "/" in name or "_call_impl" in name]


def test_collapsed_stacks():
    root = flame.flame(gpu_capture())
    lines = dict(line.rsplit(" ", 1) for line in flame.collapsed(root).splitlines())
    assert lines["run;step;Linear;aten::mm;found_by_op"] == "5000"
    assert lines["run;Memset (Device)"] == "2000"
    assert len(lines) == 5
    assert sum(map(int, lines.values())) == 167_000
    host = flame.collapsed(flame.flame(gpu_capture(), weight="cpu")).splitlines()
    assert "run;step 210000" in host and "run;step;Linear 20000" in host


def test_draw_flame():
    import matplotlib.figure

    root = flame.flame(gpu_capture())
    assert flame.depth(root) == 5
    figure = matplotlib.figure.Figure(figsize=(12, 2))
    ax = figure.subplots()
    flame.draw_flame(ax, root)
    assert len(ax.patches) == len(list(nodes(root))) == 13
    assert max(box.get_width() for box in ax.patches) == 167.0
    assert ax.get_xlim() == (0, 167.0)
    second_row = [box.get_x() for box in ax.patches if box.get_y() == 0.5]
    assert sorted(second_row) == [0.0, 95.0, 165.0], "step, autograd thread, Memset side by side"
    labels = [text.get_text() for text in ax.texts]
    assert "run  100%" in labels and "Linear  57%" in labels
    kinds = [text.get_text() for text in ax.get_legend().get_texts()]
    assert kinds == ["Python", "operator", "backward", "kernel"]
    few = figure.subplots()
    flame.draw_flame(few, root, min_share=0.1)
    assert len(few.patches) == 11, "the 5 us and 2 us kernels are too narrow"
    with pytest.raises(ValueError, match="no time"):
        flame.draw_flame(ax, flame.Node("run", "Python"))
