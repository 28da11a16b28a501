"""Exercise 03.1: what answers it, and plausible answers that do not."""

import dataclasses

import pytest
import torch

from helpers import specs, traffic
from helpers.check import check_exercise
from helpers.exercises.roofline import CASES

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def counted(op, shape, dtype):
    return getattr(traffic, op)(*shape, dtype)


def right_ridge(op, dtype, gpu):
    if op == "matmul":
        return gpu.ridge_flop_per_byte(dtype)
    return gpu.ridge_flop_per_byte(F64 if dtype == F64 else F32, tensor_cores=False)


def compared(intensity, ridge):
    return "unknown" if ridge is None else "compute" if intensity > ridge else "memory"


def answer(intensity=None, ridge=right_ridge):
    """An answer whose intensity or ridge is computed in its own way."""

    def bound_by(op, shape, dtype, gpu):
        found = intensity(op, shape, dtype) if intensity else counted(op, shape, dtype).intensity
        return compared(found, ridge(op, dtype, gpu))

    return bound_by


def solution(op, shape, dtype, gpu):  # the notebook's
    work = getattr(traffic, op)(*shape, dtype)
    if op == "matmul":
        ridge = gpu.ridge_flop_per_byte(dtype)
    else:
        lanes = torch.float64 if dtype == torch.float64 else torch.float32
        ridge = gpu.ridge_flop_per_byte(lanes, tensor_cores=False)
    if ridge is None:
        return "unknown"
    return "compute" if work.intensity > ridge else "memory"


def in_times(op, shape, dtype, gpu):
    """The same by comparing two times instead of two intensities."""
    work = counted(op, shape, dtype)
    kind, choice = (dtype, {}) if op == "matmul" else (F64 if dtype == F64 else F32, {})
    peak, bandwidth = gpu.peak_tflop_per_s(kind, **choice), gpu.memory_gb_per_s
    if op != "matmul":
        peak = gpu.peak_tflop_per_s(kind, tensor_cores=False)
    if not peak or not bandwidth:
        return "unknown"
    return "compute" if work.flops / peak / 1e12 > work.bytes / bandwidth / 1e9 else "memory"


@pytest.mark.parametrize("right", [solution, answer(), in_times])
def test_right_answers(right, capsys):
    assert check_exercise("03.1", right) is True
    assert capsys.readouterr().out == "Exercise 03.1: correct.\n"


WRONG = {}


def wrong(function):
    WRONG[function.__name__] = function
    return function


# Rules of thumb instead of counts.


@wrong
def matmul_is_compute_bound(op, shape, dtype, gpu):
    ridge = right_ridge(op, dtype, gpu)
    return "unknown" if ridge is None else "compute" if op == "matmul" else "memory"


@wrong
def only_matmul_can_be_compute_bound(op, shape, dtype, gpu):
    return (
        solution(op, shape, dtype, gpu)
        if op == "matmul"
        else compared(0, right_ridge(op, dtype, gpu))
    )


@wrong
def matmul_always_and_the_rest_counted(op, shape, dtype, gpu):
    known = solution(op, shape, dtype, gpu)
    return "compute" if op == "matmul" and known != "unknown" else known


@wrong
def always_memory(op, shape, dtype, gpu):
    return compared(0, right_ridge(op, dtype, gpu))


@wrong
def always_compute(op, shape, dtype, gpu):
    return compared(10**9, right_ridge(op, dtype, gpu))


@wrong
def large_is_compute_bound(op, shape, dtype, gpu):
    known = right_ridge(op, dtype, gpu)
    return compared(counted(op, shape, dtype).flops, known and 1e9)


@wrong
def large_matmuls_are_compute_bound(op, shape, dtype, gpu):
    if op != "matmul":
        return solution(op, shape, dtype, gpu)
    return compared(max(shape), right_ridge(op, dtype, gpu) and 1024)


# Another peak.


def scaled(factor, *ops):
    def ridge(op, dtype, gpu):
        known = right_ridge(op, dtype, gpu)
        return known and known * (factor if op in ops or not ops else 1)

    return answer(ridge=ridge)


WRONG["sparse_peaks"] = scaled(2, "matmul")
WRONG["half_the_peak"] = scaled(0.5, "matmul")  # a multiply-add is two FLOPs
WRONG["a_multiply_add_is_one_flop"] = answer(lambda *case: counted(*case).intensity / 2)
WRONG["the_inverse_of_the_ridge"] = answer(
    ridge=lambda *case: right_ridge(*case) and 1 / right_ridge(*case)
)
WRONG["terabytes_for_gigabytes"] = scaled(1e-3)
WRONG["units_forgotten"] = scaled(1e3)
WRONG["fp32_peak_for_everything"] = answer(
    ridge=lambda op, dtype, gpu: gpu.ridge_flop_per_byte(F32)
)
WRONG["fp16_peak_for_every_matmul"] = answer(
    ridge=lambda op, dtype, gpu: (
        gpu.ridge_flop_per_byte(F16) if op == "matmul" else right_ridge(op, dtype, gpu)
    )
)
WRONG["tensor_cores_for_everything"] = answer(
    ridge=lambda op, dtype, gpu: gpu.ridge_flop_per_byte(dtype)
)
WRONG["lanes_for_everything"] = answer(
    ridge=lambda op, dtype, gpu: gpu.ridge_flop_per_byte(
        F64 if dtype == F64 else F32, tensor_cores=False
    )
)
WRONG["lanes_in_the_tensors_dtype"] = answer(
    ridge=lambda op, dtype, gpu: gpu.ridge_flop_per_byte(dtype, tensor_cores=op == "matmul")
)
WRONG["fp32_lanes_for_fp64_too"] = answer(
    ridge=lambda op, dtype, gpu: (
        right_ridge(op, dtype, gpu)
        if op == "matmul"
        else gpu.ridge_flop_per_byte(F32, tensor_cores=False)
    )
)


def _tf32(op, dtype, gpu):
    tf32 = op == "matmul" and dtype == F32
    return gpu.ridge_flop_per_byte("tfloat32") if tf32 else right_ridge(op, dtype, gpu)


def _fp16_sums(op, dtype, gpu):
    if op == "matmul" and dtype == F16:
        return gpu.ridge_flop_per_byte(dtype, accumulator="float16")
    return right_ridge(op, dtype, gpu)


def _fp16_for_bf16(op, dtype, gpu):
    if op == "matmul" and dtype == torch.bfloat16:
        return gpu.ridge_flop_per_byte(F16)
    return right_ridge(op, dtype, gpu)


def _tensor_cores_left_out_of_fp64(op, dtype, gpu):
    if op == "matmul" and dtype == F64:
        return gpu.ridge_flop_per_byte(F64, tensor_cores=False)
    return right_ridge(op, dtype, gpu)


def _one_gpu_for_all(op, dtype, gpu):
    return right_ridge(op, dtype, gpu) and right_ridge(op, dtype, specs.get("A100 SXM4 80GB"))


WRONG["tf32_for_fp32"] = answer(ridge=_tf32)
WRONG["fp16_accumulators"] = answer(ridge=_fp16_sums)
WRONG["fp16_has_the_same_peak_as_bf16"] = answer(ridge=_fp16_for_bf16)
WRONG["one_gpu_for_all"] = answer(ridge=_one_gpu_for_all)
WRONG["tensor_cores_left_out_of_fp64"] = answer(ridge=_tensor_cores_left_out_of_fp64)


def _constants(op, dtype, gpu):
    """Ridges learned by heart, one a dtype, and no look at the GPU but for what it lacks."""
    by_size = {2: 200, 4: 14, 8: 9} if op == "matmul" else {2: 14, 4: 14, 8: 3}
    return right_ridge(op, dtype, gpu) and by_size[dtype.itemsize]


def _sparse_on_ampere_and_ada(op, dtype, gpu):
    ridge = right_ridge(op, dtype, gpu)
    twice = op == "matmul" and dtype.itemsize == 2 and gpu.architecture in ("Ampere", "Ada")
    return ridge and ridge * (2 if twice else 1)


def _fp64_tensor_cores_for_everything(op, dtype, gpu):
    return gpu.ridge_flop_per_byte(F64) if dtype == F64 else right_ridge(op, dtype, gpu)


def _one_flop_a_multiply_add(op, shape, dtype):
    intensity = counted(op, shape, dtype).intensity
    return intensity / 2 if op == "multiply_adds" else intensity


WRONG["constants_learned_by_heart"] = answer(ridge=_constants)
WRONG["sparse_on_ampere_and_ada"] = answer(ridge=_sparse_on_ampere_and_ada)
WRONG["fp64_tensor_cores_for_everything"] = answer(ridge=_fp64_tensor_cores_for_everything)
WRONG["one_flop_a_multiply_add"] = answer(_one_flop_a_multiply_add)
WRONG["softmax_with_four_times_the_flops"] = answer(
    lambda op, *case: counted(op, *case).intensity * (4 if op == "softmax" else 1)
)


# Another count.


def matmul_intensity(count):
    """Another intensity for matmuls alone."""
    return answer(
        lambda op, shape, dtype: (
            count(*shape, dtype.itemsize) if op == "matmul" else counted(op, shape, dtype).intensity
        )
    )


def elements(m, n, k):
    return m * k + k * n + m * n


WRONG["bytes_per_flop"] = answer(lambda *case: 1 / counted(*case).intensity)
WRONG["elements_for_bytes"] = answer(
    lambda op, shape, dtype: counted(op, shape, dtype).intensity * dtype.itemsize
)
WRONG["every_element_has_4_bytes"] = answer(
    lambda op, shape, dtype: counted(op, shape, F32).intensity
)
WRONG["every_element_has_2_bytes"] = answer(
    lambda op, shape, dtype: counted(op, shape, F16).intensity
)
WRONG["reads_alone"] = answer(lambda *case: counted(*case).flops / counted(*case).bytes_read)
WRONG["writes_alone"] = answer(lambda *case: counted(*case).flops / counted(*case).bytes_written)
WRONG["the_result_forgotten"] = matmul_intensity(
    lambda m, n, k, size: 2 * m * n * k / ((m * k + k * n) * size)
)
WRONG["one_input_forgotten"] = matmul_intensity(
    lambda m, n, k, size: 2 * m * n * k / ((m * k + m * n) * size)
)
WRONG["the_other_input_forgotten"] = matmul_intensity(
    lambda m, n, k, size: 2 * m * n * k / ((k * n + m * n) * size)
)
WRONG["every_matmul_a_square_of_its_first_side"] = matmul_intensity(
    lambda m, n, k, size: 2 * m / 3 / size
)
WRONG["every_matmul_a_square_of_its_largest_side"] = matmul_intensity(
    lambda m, n, k, size: 2 * max(m, n, k) / 3 / size
)
WRONG["every_matmul_a_square_of_its_last_side"] = matmul_intensity(
    lambda m, n, k, size: 2 * k / 3 / size
)
WRONG["the_naive_kernels_loads"] = matmul_intensity(
    lambda m, n, k, size: 2 * m * n * k / ((2 * m * n * k + m * n) * size)
)
WRONG["flops_of_n_cubed"] = matmul_intensity(
    lambda m, n, k, size: m * n * k / (elements(m, n, k) * size)
)


# What a datasheet does not say, and how the answer is given.


@wrong
def a_matmul_computes_even_where_the_bandwidth_is_unknown(op, shape, dtype, gpu):
    unknown = gpu.memory_gb_per_s is None and op == "matmul"
    return "compute" if unknown else solution(op, shape, dtype, gpu)


@wrong
def elementwise_is_memory_even_where_the_peak_is_unknown(op, shape, dtype, gpu):
    unknown = gpu.fp32_tflops is None and op in ("relu", "softmax")
    return "memory" if unknown else solution(op, shape, dtype, gpu)


@wrong
def a_guess_for_what_is_unknown(op, shape, dtype, gpu):
    known = solution(op, shape, dtype, gpu)
    return "memory" if known == "unknown" else known


@wrong
def another_guess(op, shape, dtype, gpu):
    known = solution(op, shape, dtype, gpu)
    return "compute" if known == "unknown" else known


@wrong
def raises_on_an_unknown_figure(op, shape, dtype, gpu):
    ridge = right_ridge(op, dtype, gpu)
    return "compute" if counted(op, shape, dtype).intensity > ridge else "memory"


@wrong
def only_the_bandwidth_can_be_unknown(op, shape, dtype, gpu):
    if gpu.memory_gb_per_s is None:
        return "unknown"
    return compared(counted(op, shape, dtype).intensity, right_ridge(op, dtype, gpu) or 0)


@wrong
def only_a_peak_can_be_unknown(op, shape, dtype, gpu):
    if gpu.memory_gb_per_s is None:
        gpu = dataclasses.replace(gpu, memory_gb_per_s=1000.0)
    return solution(op, shape, dtype, gpu)


@wrong
def none_for_what_is_unknown(op, shape, dtype, gpu):
    known = solution(op, shape, dtype, gpu)
    return None if known == "unknown" else known


@wrong
def capitalised(op, shape, dtype, gpu):
    return solution(op, shape, dtype, gpu).capitalize()


@wrong
def bound(op, shape, dtype, gpu):
    return solution(op, shape, dtype, gpu) + "-bound"


@wrong
def prints_instead(op, shape, dtype, gpu):
    print(solution(op, shape, dtype, gpu))


@wrong
def truth_values(op, shape, dtype, gpu):
    return solution(op, shape, dtype, gpu) == "compute"


@wrong
def swapped(op, shape, dtype, gpu):
    other = {"memory": "compute", "compute": "memory"}
    return other.get(solution(op, shape, dtype, gpu), "unknown")


@wrong
def takes_too_few_arguments(op, shape):
    return "memory"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers(name, capsys):
    assert check_exercise("03.1", WRONG[name]) is False
    assert "Exercise 03.1: not yet." in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_case_is_close_to_a_ridge(case):
    op, shape, dtype, name, expected = case
    gpu = specs.get(name)
    intensity, ridge = counted(op, shape, dtype).intensity, right_ridge(op, dtype, gpu)
    assert not 1 / 1.2 <= intensity / ridge <= 1.2
    assert expected == compared(intensity, ridge)


def test_the_hint_names_the_case(capsys):
    check_exercise("03.1", WRONG["sparse_peaks"])
    hint = capsys.readouterr().out
    assert "compute-bound, not 'memory'" in hint and "matmul (" in hint
    assert "it has 300 FLOPs a byte, and the ridge is at 206" in hint
