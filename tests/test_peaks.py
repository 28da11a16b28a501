"""Peaks from parts against datasheets, and exercise 01.1 with answers that are wrong."""

import dataclasses
import math

import numpy as np
import pytest

from helpers import peaks, specs
from helpers.check import check_exercise
from helpers.exercises.specs import PRODUCTS, parts

ROWS = ["L1, TB/s", "fp32 lanes, TFLOP/s", "fp16 matmul, TFLOP/s", "memory, GB/s"]


def test_an_a100_by_hand():
    frame = peaks.from_parts(specs.get("A100 SXM4 80GB"))
    assert list(frame.index) == ROWS
    by_hand = [
        108 * 128 * 1.41e9 / 1e12,
        108 * 64 * 2 * 1.41e9 / 1e12,
        108 * 4 * 256 * 2 * 1.41e9 / 1e12,
        5120 / 8 * 3186e6 / 1e9,
    ]
    assert frame["rebuilt"].tolist() == pytest.approx(by_hand)
    assert frame["datasheet"].tolist()[1:] == [19.5, 312, 2039]
    assert "108 SMs x 1024 multiply-adds x 2 x 1.410 GHz" in frame["parts"].tolist()


@pytest.mark.parametrize("gpu", specs.gpus(), ids=lambda gpu: gpu.name)
def test_every_datasheet_is_rebuilt(gpu):
    frame = peaks.from_parts(gpu)
    known = frame["datasheet"].notna()
    assert known.tolist() == [False, True, True, True]
    assert (frame["rebuilt"] / frame["datasheet"] - 1)[known].abs().max() <= 0.03


def test_the_l1():
    rates = {name: peaks.l1_bytes_per_clock(specs.get(name)) for name in ("T4", "H200 SXM")}
    assert rates == {"T4": 64, "H200 SXM": 128}
    assert math.isnan(peaks.l1_bytes_per_clock(specs.get("MI300X")))
    for capability in (None, "6.1"):
        unknown = dataclasses.replace(specs.get("T4"), compute_capability=capability)
        assert math.isnan(peaks.l1_bytes_per_clock(unknown))


def test_what_is_unknown_is_nan():
    fields = "sms boost_mhz memory_bus_bits memory_mtps compute_capability fp32_tflops".split()
    frame = peaks.from_parts(dataclasses.replace(specs.get("T4"), **dict.fromkeys(fields)))
    assert frame["rebuilt"].isna().all()
    assert frame["datasheet"].notna().tolist() == [False, False, True, True]


def solution(parts):  # the notebook's
    fp32 = parts.sms * parts.lanes_per_sm * 2 * parts.clock_mhz * 1e6
    per_clock = parts.tensor_cores_per_sm * parts.multiply_adds_per_tensor_core
    fp16 = parts.sms * per_clock * 2 * parts.tensor_clock_mhz * 1e6
    return fp32 / 1e12, fp16 / 1e12, parts.bus_bits / 8 * parts.mtps * 1e6 / 1e9


def test_the_solution(capsys):
    assert check_exercise("01.1", solution) is True
    assert capsys.readouterr().out == "Exercise 01.1: correct.\n"


def scaled(fp32=1.0, fp16=1.0, memory=1.0):
    return lambda parts: tuple(
        value * factor for value, factor in zip(solution(parts), (fp32, fp16, memory), strict=True)
    )


def changed(**changes):
    """The solution, for parts of which some are misread: name -> function of the parts."""
    return lambda parts: solution(
        dataclasses.replace(parts, **{name: read(parts) for name, read in changes.items()})
    )


WRONG = {
    "a multiply-add is one": scaled(fp32=0.5, fp16=0.5),
    "one in the lanes alone": scaled(fp32=0.5),
    "sparse": scaled(fp16=2),
    "bits for bytes": scaled(memory=8),
    "double data rate, twice": scaled(memory=2),
    "GiB": scaled(memory=1e9 / 2**30),
    "GHz for MHz": scaled(fp32=1e-3, fp16=1e-3),
    "FLOP/s": scaled(fp32=1e12, fp16=1e12),
    "TB/s": scaled(memory=1e-3),
    "one clock for all": changed(tensor_clock_mhz=lambda p: p.clock_mhz),
    "one clock for all, the other": changed(clock_mhz=lambda p: p.tensor_clock_mhz),
    "always four tensor cores": changed(tensor_cores_per_sm=lambda p: 4),
    "one tensor core": changed(tensor_cores_per_sm=lambda p: 1),
    "an A100's tensor cores": changed(multiply_adds_per_tensor_core=lambda p: 256),
    "an A100's lanes": changed(lanes_per_sm=lambda p: 64),
    "the full die": changed(sms=lambda p: {108: 128, 132: 144}.get(p.sms, p.sms)),
    "the A100 only": lambda parts: (19.5, 312, 2039),
    "two numbers": lambda parts: solution(parts)[:2],
    "one number": lambda parts: solution(parts)[0],
    "not finite": lambda parts: (*solution(parts)[:2], math.nan),
    "words": lambda parts: ("19.5", "312", "2039"),
    "swapped": lambda parts: (solution(parts)[1], solution(parts)[0], solution(parts)[2]),
}


@pytest.mark.parametrize("name", WRONG)
def test_plausible_wrong_answers(name, capsys):
    assert check_exercise("01.1", WRONG[name]) is False
    said = capsys.readouterr().out
    assert "not yet" in said and "raises" not in said


def test_the_hint_names_product_and_figures(capsys):
    check_exercise("01.1", scaled(memory=8))
    said = capsys.readouterr().out
    assert "A100 SXM4 80GB, memory: GB/s: 16,312" in said and "2,039" in said and "8 times" in said


@pytest.mark.parametrize(
    "wrong, hint",
    [
        (dict(fp32=0.5), "2 times too small. A multiply-add is two FLOPs."),
        (dict(memory=8), "8 times too large. A byte is eight bits."),
        (dict(fp32=1e-6), "1e+06 times too small. TFLOP/s are 10^12"),
        (dict(fp16=1.5), "1.5 times too large.\n"),
    ],
)
def test_hints_name_the_likely_cause(wrong, hint, capsys):
    assert check_exercise("01.1", scaled(**wrong)) is False
    assert hint in capsys.readouterr().out


def test_answers_may_be_arrays_and_must_be_functions(capsys):
    right = scaled()
    assert check_exercise("01.1", lambda parts: np.array(right(parts))) is True
    assert check_exercise("01.1", right(parts(specs.get("T4")))) is False
    assert "Pass the function itself" in capsys.readouterr().out


def test_the_stub_is_not_attempted(capsys):
    def peaks(parts):
        raise NotImplementedError

    assert check_exercise("01.1", peaks) is None


def test_the_parts_are_whole_numbers():
    for name in PRODUCTS:
        found = parts(specs.get(name))
        units = specs.UNITS[specs.get(name).compute_capability]["fp16"]
        assert found.tensor_cores_per_sm * found.multiply_adds_per_tensor_core == units
