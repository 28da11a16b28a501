"""The checker of exercise 13.1 takes what is right, and says what is wrong."""

import dataclasses
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from verdicts import verdict

from helpers import check, roofline, traffic
from helpers.exercises import whole_block
from helpers.traffic import Work

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(check.EXERCISES, "13.1", "helpers.exercises.whole_block:block_ms")


def solution(batch, sequence, width, heads, gb_per_s, tflop_per_s, fused):  # the notebook's
    stream, scores = batch * sequence * width, batch * heads * sequence**2
    product = batch * sequence**2 * width  # multiply-adds of one of attention's two

    def ms(numbers, multiply_adds=0):
        return max(2 * numbers / gb_per_s / 1e6, 2 * multiply_adds / tflop_per_s / 1e9)

    def linear(inputs, outputs, residual=0):  # in widths
        weights = inputs * outputs * width**2
        return ms((inputs + outputs + residual) * stream + weights, batch * sequence * weights)

    norms = 2 * ms(2 * stream + width)
    products = linear(1, 3) + linear(1, 1, fused) + linear(1, 4) + linear(4, 1, fused)
    if fused:
        return norms + products + ms(4 * stream, product)
    attention = 2 * ms(2 * stream + scores, product) + ms(2 * scores)
    return norms + products + attention + 2 * ms(3 * stream) + ms(8 * stream)


def works(batch, sequence, width, heads, fused, dtype=BF16):
    """Each operation's work, by helpers.traffic where it counts alike."""
    tokens, dim = batch * sequence, width // heads
    stream, matrices = tokens * width, batch * heads
    scores = matrices * sequence**2
    norm = traffic.copy(stream, dtype) + Work(width * dtype.itemsize, 0, 0)  # and the scale
    found = {
        "norm 1": norm,
        "qkv": traffic.linear(tokens, width, 3 * width, dtype),
        "projection": traffic.linear(tokens, width, width, dtype),
        "norm 2": norm,
        "up": traffic.linear(tokens, width, 4 * width, dtype),
        "down": traffic.linear(tokens, 4 * width, width, dtype),
    }
    if fused:
        attention = traffic.attention(batch, heads, sequence, dim, dtype, causal=True)
        log_sum_exp = Work(0, -4 * tokens * heads, 0)
        residual = Work(stream * dtype.itemsize, 0, 0)
        return {
            **found,
            "attention": attention + log_sum_exp,
            "projection": found["projection"] + residual,
            "down": found["down"] + residual,
        }
    return {
        **found,
        "QKᵀ": traffic.matmul(sequence, sequence, dim, dtype, batch=matrices),
        "softmax": traffic.copy(scores, dtype),
        "PV": traffic.matmul(sequence, dim, sequence, dtype, batch=matrices),
        "add 1": traffic.elementwise(stream, dtype, reads=2, flops=0),
        "add 2": traffic.elementwise(stream, dtype, reads=2, flops=0),
        "GeLU": traffic.copy(4 * stream, dtype),
    }


def by_traffic(change=lambda found, *sizes: found, predict=roofline.predict_ms, **options):
    """An answer by `works`, each of which `change` may replace in a copy of them."""

    def answer(batch, sequence, width, heads, gb_per_s, tflop_per_s, fused):
        sizes = batch, sequence, width, heads, fused
        found = change(works(*sizes, **options), *sizes)
        return sum(predict(work, gb_per_s, tflop_per_s) for work in found.values())

    return answer


def with_flops_that_do_not_matter(found, *sizes):
    """With what norms, softmax, GeLU and adds compute, which takes less than what they move."""
    flops = {"norm 1": 8, "norm 2": 8, "softmax": 5, "GeLU": 9, "add 1": 1, "add 2": 1}
    return {
        name: work + Work(0, 0, flops.get(name, 0) * work.bytes_written / 2)
        for name, work in found.items()
    }


@pytest.mark.parametrize(
    "right",
    [
        solution,
        by_traffic(),
        by_traffic(with_flops_that_do_not_matter),
        lambda *case: np.float64(solution(*case)),
        lambda *case: np.float32(solution(*case)),
        lambda *case: np.array(solution(*case)),
        lambda *case: torch.tensor(solution(*case)),
        lambda *case: torch.tensor(solution(*case), dtype=torch.float64, requires_grad=True),
        lambda *case: Fraction(solution(*case)),
        lambda *case: solution(*case) * (1 + 5e-7),
    ],
)
def test_right_times(capsys, right):
    assert verdict(capsys, "13.1", right) == "correct."


def test_a_block_by_hand():
    # 1,024 tokens of width 1,024, where 1 GB/s moves 2 bytes in 2e-6 ms and nothing computes.
    stream, weights = 2**20, 12 * 2**20  # numbers
    norms, linear = 4 * stream + 2 * 1024, (4 + 2 + 5 + 5) * stream + weights
    apart = norms + linear + (4 + 4 * 16) * stream + (6 + 8) * stream  # 16 heads: 16 x 2^20 scores
    together = norms + linear + 4 * stream + 2 * stream
    for fused, numbers in ((False, apart), (True, together)):
        assert math.isclose(solution(1, 1024, 1024, 16, 1, 1e9, fused), numbers * 2e-6)
    # The other way round: 12 width^2 multiply-adds a token, and attention's 2 n width, or half.
    for fused, share in ((False, 1), (True, 1 / 2)):
        flops = 2 * 2**10 * (12 * 2**20 + share * 2 * 2**20)
        at = 1, 1024, 1024, 16, 1e12, 1, fused
        assert math.isclose(solution(*at), flops / 1e9, rel_tol=1e-6)


def test_the_cases_have_what_goes_wrong():
    cases = list(whole_block._cases())
    assert {case.fused for case in cases} == {True, False}
    assert {1} < {case.heads for case in cases} and {1} < {case.sequence for case in cases}
    assert any(math.log2(case.width) % 1 for case in cases)
    assert all(case.width % case.heads == 0 for case in cases)
    bound = set()
    for *sizes, gb_per_s, tflop_per_s, fused in cases:
        ridge = roofline.ridge_flop_per_byte(gb_per_s, tflop_per_s)
        intensities = {n: w.intensity for n, w in works(*sizes, fused).items() if w.flops}
        assert not any(math.isclose(i, ridge, rel_tol=1e-3) for i in intensities.values())
        bound |= {(name, i > ridge) for name, i in intensities.items()}
    products = {"qkv", "projection", "up", "down", "attention", "QKᵀ", "PV"}
    assert bound == {(name, over) for name in products for over in (True, False)}


# Wrong answers: Work changed for the operations, or times put together otherwise.


def changed(names, change):
    """Operations whose name is among these (a regular expression) get change(work, *sizes)."""
    return by_traffic(
        lambda found, *sizes: {
            name: change(work, *sizes) if re.fullmatch(names, name) else work
            for name, work in found.items()
        }
    )


def without(names):
    return by_traffic(
        lambda found, *_: {n: work for n, work in found.items() if not re.fullmatch(names, n)}
    )


def times_flops(factor):
    return lambda work, *_: dataclasses.replace(work, flops=factor * work.flops)


def moves_more(elements):
    """elements(batch, sequence, width, heads, fused) of 2 bytes, read besides."""
    return lambda work, *sizes: work + Work(2 * elements(*sizes), 0, 0)


def as_if(fused):
    return lambda *case: solution(*case[:-1], fused)


def some_apart(names):
    """These operations as they are without fusion, also in the fused form."""

    def change(found, batch, sequence, width, heads, fused):
        apart = works(batch, sequence, width, heads, False)
        return found | {n: work for n, work in apart.items() if re.fullmatch(names, n)}

    return change


def attention_apart(found, *sizes):
    found = some_apart("QKᵀ|softmax|PV")(found, *sizes)
    return {name: work for name, work in found.items() if name != "attention"}


def longest_of_all(*case):
    *sizes, gb_per_s, tflop_per_s, fused = case
    total = sum(works(*sizes, fused).values(), Work(0, 0, 0))
    return roofline.predict_ms(total, gb_per_s, tflop_per_s)


def sums(work, gb_per_s, tflop_per_s):
    return work.bytes / gb_per_s / 1e6 + work.flops / tflop_per_s / 1e9


def one_wide_qkv(found, batch, sequence, width, heads, fused):
    return {**found, "qkv": traffic.linear(batch * sequence, width, width, BF16)}


def without_weights(found, batch, sequence, width, heads, fused):
    widths = {"qkv": 3, "projection": 1, "up": 4, "down": 4}
    return {
        name: work + Work(-2 * widths.get(name, 0) * width**2, 0, 0) for name, work in found.items()
    }


def half_the_scores(work, batch, sequence, width, heads, fused):
    times = 1 if work.flops else 2  # a product reads or writes them, softmax does both
    return work + Work(-times * batch * heads * sequence**2, 0, 0)


def minus_scores(batch, sequence, width, heads, fused):
    return -batch * heads * sequence**2


WRONG = {
    "the sum": (by_traffic(predict=sums), "take the longer, not the sum"),
    "one maximum": (longest_of_all, "take the longer for each operation, not once for the block"),
    "fp32": (by_traffic(dtype=F32), "these are fp32's 4 bytes"),
    "elements": (
        by_traffic(lambda found, *_: {n: w + Work(-w.bytes / 2, 0, 0) for n, w in found.items()}),
        "has 2 bytes, not 1",
    ),
    "multiply-adds": (changed(".*", times_flops(1 / 2)), "a multiply-add is two FLOPs"),
    "GiB": (
        lambda *case: solution(*case[:4], case[4] * 2**30 / 1e9, *case[5:]),
        r"10\^9 bytes, not 2\^30",
    ),
    "TiFLOP": (lambda *case: solution(*case[:5], case[5] * 2**40 / 1e12, case[6]), r"not 2\^40"),
    "seconds": (lambda *case: solution(*case) / 1e3, "these are seconds"),
    "microseconds": (lambda *case: solution(*case) * 1e3, "these are microseconds"),
    "no weights": (by_traffic(without_weights), "a projection reads its weights as well"),
    "q, k, v as one": (by_traffic(one_wide_qkv), "gives q, k and v, each as wide"),
    "no projection": (without("projection"), "goes through a projection, too"),
    "no norms": (without("norm ."), "a layer norm is a kernel in both forms"),
    "one norm": (without("norm 2"), "there are two layer norms"),
    "no scale": (changed("norm .", moves_more(lambda b, s, w, h, f: -w)), "reads its scale, too"),
    "a shift": (changed("norm .", moves_more(lambda b, s, w, h, f: w)), "there are no biases"),
    "by head": (
        changed("QKᵀ|PV|attention", lambda work, b, s, w, h, f: times_flops(h)(work)),
        "as wide as the model divided by the heads",
    ),
    "fused always": (as_if(True), "False\\) is .* `fused` is False here"),
    "never fused": (as_if(False), "True\\) is .* `fused` is True here"),
    "the other way round": (
        lambda *case: solution(*case[:-1], not case[-1]),
        "`fused` is False here",
    ),
    # Not fused.
    "halved products": (changed("QKᵀ|PV", times_flops(1 / 2)), "it computes all n x n scores"),
    "half the scores moved": (
        changed("QKᵀ|PV|softmax", half_the_scores),
        "all n x n scores go through memory",
    ),
    "no softmax": (without("softmax"), "softmax is a kernel as well"),
    "softmax reads": (changed("softmax", moves_more(minus_scores)), "also writes the weights"),
    "scores on the chip": (
        changed("QKᵀ|PV", moves_more(minus_scores)),
        "first product of attention writes the scores, and the second reads them",
    ),
    "no GeLU": (without("GeLU"), "GeLU is a kernel of its own here"),
    "a narrow GeLU": (
        changed("GeLU", moves_more(lambda b, s, w, h, f: -6 * b * s * w)),
        "or GeLU's tensors are four times as wide",
    ),
    "no adds": (without("add ."), "two residual adds are missing"),
    "one add": (without("add 2"), "the residual is added twice"),
    "add in place": (
        changed("add .", moves_more(lambda b, s, w, h, f: -b * s * w)),
        "an addition reads two tensors and writes one",
    ),
    # Fused.
    "attention in three": (
        by_traffic(attention_apart),
        "attention is one kernel here, and its scores stay on the chip",
    ),
    "GeLU apart": (by_traffic(some_apart("GeLU")), "GeLU is in an epilogue here"),
    "adds apart": (
        by_traffic(some_apart("projection|down|add .")),
        "residuals are added in epilogues here, not by kernels",
    ),
    "not halved": (changed("attention", times_flops(2)), "it computes half of n x n"),
    "the diagonal": (
        changed("attention", lambda work, b, s, *_: times_flops((s + 1) / s)(work)),
        r"not n \(n \+ 1\) / 2",
    ),
    "one product": (changed("attention", times_flops(1 / 2)), "attention has two products"),
    "one input": (
        changed("attention", moves_more(lambda b, s, w, h, f: -2 * b * s * w)),
        "attention reads q, k and v",
    ),
    "log-sum-exp": (
        changed("attention", moves_more(lambda b, s, w, h, f: 2 * b * s * h)),
        "the log-sum-exp is for a backward pass",
    ),
    "no residual": (
        changed("projection|down", moves_more(lambda b, s, w, h, f: -b * s * w * f)),
        "an epilogue that adds the residual reads it from memory",
    ),
    "residual written": (
        changed("projection|down", moves_more(lambda b, s, w, h, f: b * s * w * f)),
        "no write besides",
    ),
    # Two of them, and what no hint knows.
    "seconds of multiply-adds": (
        lambda *case: changed(".*", times_flops(1 / 2))(*case) / 1e3,
        "a multiply-add is two FLOPs; and these are seconds",
    ),
    "five seconds more": (
        lambda *case: solution(*case) + 5,
        "of it linear layers take 0.0586 ms, attention 0.08913, the rest 0.02359$",
    ),
    "one residual": (
        changed("down", moves_more(lambda b, s, w, h, f: -b * s * w * f)),
        "True\\) is .*of it linear layers take",
    ),
    "by heart": (lambda *case: solution(4, 1024, 768, 12, 4800, 989.4, case[-1]), "of it linear"),
    "almost": (lambda *case: solution(*case) * (1 + 1e-5), "of it linear"),
    "its input": (lambda *case: case[0], "not 4: of it linear"),
    "NaN": (lambda *case: math.nan, "not nan: of it linear"),
    "negative": (lambda *case: -solution(*case), "not -0.17"),
    # No numbers.
    "nothing": (lambda *case: None, r"^not yet\. block_ms\(.*\) needs a number of ms, not None"),
    "everything": (lambda *case: case, r"needs a number of ms, not \(4, 1024"),
    "text": (lambda *case: str(solution(*case)), "needs a number of ms, not '0.17"),
    "truth": (lambda *case: True, "needs a number of ms, not True"),
    "NumPy's truth": (lambda *case: np.True_, "needs a number of ms, not .*True"),
    "complex": (lambda *case: complex(solution(*case)), "needs a number of ms"),
    "a list": (lambda *case: [solution(*case)], "needs a number of ms, not "),
    "a vector": (lambda *case: torch.tensor([solution(*case)]), "needs a number of ms, not tensor"),
    "raises": (lambda *case: {}["x"], "It raises KeyError"),
    "too few arguments": (lambda batch, sequence: 1.0, "It raises TypeError"),
}


@pytest.mark.parametrize("wrong, hint", WRONG.values(), ids=WRONG)
def test_wrong_times(capsys, wrong, hint):
    said = verdict(capsys, "13.1", wrong)
    assert re.search(hint, said), said
    assert len(said) < 300


@pytest.mark.parametrize("changes, hint", whole_block.SLIPS, ids=lambda value: str(value)[:40])
def test_every_slip_is_told_from_the_others(capsys, changes, hint):
    rules = dataclasses.replace(whole_block.RULES, **changes)
    wrong = verdict(capsys, "13.1", lambda *case: whole_block._ms(whole_block.Case(*case), rules))
    assert wrong.endswith(f": {hint}")


def test_the_hint_reads_well(capsys):
    said = verdict(capsys, "13.1", WRONG["softmax reads"][0])
    assert re.fullmatch(
        r"not yet\. block_ms\(4, 1024, 768, 12, 4800\.0, 989\.4, False\) is 0\.171326 ms, not "
        r"0\.\d+: softmax reads the scores and also writes the weights",
        said,
    ), said


def test_the_stub_is_not_attempted(capsys):
    def stub(batch, sequence, width, heads, gb_per_s, tflop_per_s, fused):
        raise NotImplementedError

    assert verdict(capsys, "13.1", stub) == "not attempted yet."
