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


def test_a_lost_nan_is_not_hidden_by_any_number():
    for value in (0.5, 0.0, 1.0):
        actual, expected = torch.tensor([value, 1.0]), torch.tensor([math.nan, 1.0])
        assert relative_error(actual, expected) == relative_error(expected, actual) == math.inf
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert relative_error(largest, torch.tensor([math.inf])) == math.inf


def test_fp32_is_held_to_fp32():
    reference = torch.randn(1000, dtype=torch.float64)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close((reference * (1 + 1e-4)).float(), reference)
    with pytest.raises(TypeError, match="complex"):
        assert_close(torch.ones(2, dtype=torch.complex64), torch.ones(2))


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


def median_of_trials(gpu, run):  # hides a cold first trial and a busy device, waits for neither
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


def not_a_number(gpu, run):
    run()
    return float("nan")


def in_words(gpu, run):
    return f"{waits_once(gpu, run)} ms"


def five_percent_off(gpu, run):
    return waits_once(gpu, run) * 1.05


def drowned_in_trials(gpu, run):  # the missing wait at the start is hidden, not mended
    run()
    start = gpu.time()
    for _ in range(2_000):
        run()
    gpu.synchronize()
    return (gpu.time() - start) / 2_000 * 1000


def with_a_default(gpu, run, trials=5):
    return waits_once(gpu, run)


@pytest.mark.parametrize("answer", [waits_once, waits_each_time, with_a_default])
def test_right_timers_are_accepted(answer, capsys):
    assert check_exercise("02.1", answer, waits_once, answer) is True
    assert capsys.readouterr().out == "Exercise 02.1: correct.\n"


@pytest.mark.parametrize(
    "answer",
    [
        *benchmarking.BROKEN,
        no_warm_up,
        wrong_unit,
        total_not_mean,
        constant,
        not_a_number,
        in_words,
        five_percent_off,
        drowned_in_trials,
        median_of_trials,
    ],
)
@pytest.mark.parametrize("position", range(3))
def test_wrong_timers_are_rejected(answer, position, capsys):
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


def test_an_assert_without_a_word_is_told_too(capsys):
    def asserts(gpu, run):
        raise AssertionError  # as `assert` does outside of pytest

    assert check_exercise("02.1", waits_once, waits_once, asserts) is False
    assert capsys.readouterr().out == "Exercise 02.1: not yet. An assert in it fails.\n"


def test_unknown_exercise_is_refused():
    with pytest.raises(ValueError, match=r"99\.9"):
        check_exercise("99.9")


def test_every_registered_exercise_can_be_called():
    import importlib

    for target in EXERCISES.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))
