"""Comparison with a reference, and the checker of exercises, with wrong answers that must fail."""

import math

import pytest
import torch

from helpers.check import EXERCISES, assert_close, check_exercise, relative_error
from helpers.exercises import benchmarking


def test_relative_error_against_numbers_worked_out_by_hand():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.ones(3), torch.zeros(3)) == math.inf
    assert relative_error(torch.empty(0, 5), torch.empty(0, 5)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes(bad):
    expected = torch.randn(100, dtype=torch.float64)
    actual = expected.clone()
    actual[17] = bad
    assert relative_error(actual, expected) == math.inf
    with pytest.raises(AssertionError, match=r"worst at \(17,\)"):
        assert_close(actual, expected)


def test_special_values_must_match_in_kind():
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert relative_error(special, special) == 0
    assert relative_error(special[[1, 0, 2, 3]], special) == math.inf
    assert relative_error(special[[0, 2, 1, 3]], special) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_one_wrong_element_does_not(dtype):
    reference = torch.randn(37, 41, dtype=torch.float64)
    rounded = reference.to(dtype)
    assert_close(rounded, reference)
    wrong = rounded.clone()
    wrong[3, 5] += 3
    with pytest.raises(AssertionError, match=r"worst at \(3, 5\)"):
        assert_close(wrong, reference)


def test_shape_and_unknown_dtype_are_named():
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), expected \(3, 2\)"):
        assert_close(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(TypeError, match="int32"):
        assert_close(torch.ones(2, dtype=torch.int32), torch.ones(2))


# Exercise 02.1: plausible answers, right and wrong.


def waits_once(gpu, run):
    run()
    gpu.synchronize()
    start = gpu.time()
    for _ in range(5):
        run()
    gpu.synchronize()
    return (gpu.time() - start) / 5 * 1000


def waits_each_time(gpu, run):
    run()
    total = 0
    for _ in range(4):
        gpu.synchronize()
        start = gpu.time()
        run()
        gpu.synchronize()
        total += gpu.time() - start
    return total / 4 * 1000


def median_of_trials(gpu, run):  # robust against a cold first trial, but not against the queue
    times = []
    for _ in range(5):
        start = gpu.time()
        run()
        gpu.synchronize()
        times.append(gpu.time() - start)
    return sorted(times)[2] * 1000


def no_warm_up(gpu, run):
    gpu.synchronize()
    start = gpu.time()
    run()
    gpu.synchronize()
    return (gpu.time() - start) * 1000


def wrong_unit(gpu, run):
    return waits_once(gpu, run) / 1000


def total_not_mean(gpu, run):
    return waits_once(gpu, run) * 5


def constant(gpu, run):
    return 5.0


@pytest.mark.parametrize("answer", [waits_once, waits_each_time, median_of_trials])
def test_exercise_accepts_what_reads_true(answer, capsys):
    assert check_exercise("02.1", answer, waits_once, answer) is True
    assert capsys.readouterr().out == "Exercise 02.1: correct.\n"


@pytest.mark.parametrize(
    "answer", [*benchmarking.BROKEN, no_warm_up, wrong_unit, total_not_mean, constant]
)
@pytest.mark.parametrize("position", range(3))
def test_exercise_rejects_what_does_not(answer, position, capsys):
    answers = [waits_once] * 3
    answers[position] = answer
    assert check_exercise("02.1", *answers) is False
    assert "not yet" in capsys.readouterr().out


def test_exercise_says_so_while_the_stub_is_untouched(capsys):
    def stub(gpu, run):
        raise NotImplementedError

    assert check_exercise("02.1", stub, stub, stub) is None
    assert capsys.readouterr().out == "Exercise 02.1: not attempted yet.\n"


def test_an_answer_that_raises_is_told_its_own_error(capsys):
    assert check_exercise("02.1", waits_once, waits_once, lambda gpu, run: 1 / 0) is False
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert check_exercise("02.1", waits_once, waits_once) is False
    assert check_exercise("02.1", waits_once, waits_once, lambda gpu: 1) is False


def test_unknown_exercise_is_refused():
    with pytest.raises(ValueError, match=r"99\.9"):
        check_exercise("99.9")


def test_every_registered_exercise_can_be_called():
    import importlib

    for target in EXERCISES.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))
