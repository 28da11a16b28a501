"""The checker of exercise 13.1: how long a transformer block takes."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import NamedTuple

import torch

from helpers import specs
from helpers.exercises.answers import plain

TOLERANCE = 1e-6
LINEAR, ATTENTION, REST = "linear layers take {:.4g} ms", "attention {:.4g}", "the rest {:.4g}"


class Case(NamedTuple):
    """What block_ms takes, in its order."""

    batch: int
    sequence: int
    width: int
    heads: int
    gb_per_s: float
    tflop_per_s: float
    fused: bool

    def __str__(self) -> str:
        return f"block_ms({', '.join(map(str, self))})"


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the block is counted. Whatever differs from these values is a slip of `SLIPS`.

    Pairs are (not fused, fused).
    """

    together: str = "each"  # the longer of moving and computing of each operation
    number: int = 2  # bytes
    multiply_add: int = 2  # FLOPs
    giga: int = 10**9
    tera: int = 10**12
    second: float = 1e3  # ms
    weights: int = 1  # how often a projection reads them
    qkv: int = 3  # widths
    hidden: int = 4  # widths
    norms: int = 2
    scale: int = 1  # widths that a layer norm reads besides its input
    adds: int = 2
    add: int = 3  # tensors that an addition reads and writes
    residual: int = 1  # tensors that an addition moves besides, in the projection's epilogue
    flash: tuple[bool, bool] = (False, True)  # attention as one kernel
    gelu_apart: tuple[bool, bool] = (True, False)  # as kernels of their own
    adds_apart: tuple[bool, bool] = (True, False)
    output_projection: bool = True
    fused_pairs: float = 1 / 2  # of n x n queries and keys
    diagonal: int = 0  # 1 for n (n + 1) in place of n x n
    fused_products: int = 2
    fused_inputs: int = 3  # q, k, v
    log_sum_exp: int = 0  # fp32 numbers a query and head
    pairs: float = 1  # of n x n queries and keys
    moved_pairs: float = 1
    softmax: int = 2  # how often it goes through all scores
    scores: int = 1  # how often each product of attention does
    one_head: bool = False  # scores as of one head
    whole_width: bool = False  # heads as wide as the model
    one_sequence: bool = False  # attention across the batch


RULES = Rules()

# What is often counted instead, and what to say to it.
SLIPS: tuple[tuple[dict, str], ...] = (
    ({"together": "sum"}, "an operation moves while it computes: take the longer, not the sum"),
    (
        {"together": "block"},
        "one operation cannot move while another computes: take the longer for each operation, "
        "not once for the block",
    ),
    ({"number": 4}, "these are fp32's 4 bytes: a number has 16 bits"),
    ({"number": 1}, "a number of 16 bits has 2 bytes, not 1"),
    ({"multiply_add": 1}, "a multiply-add is two FLOPs"),
    ({"giga": 2**30}, "a GB of a datasheet is 10^9 bytes, not 2^30"),
    ({"tera": 2**40}, "a TFLOP is 10^12 FLOPs, not 2^40"),
    ({"second": 1}, "these are seconds"),
    ({"second": 1e6}, "these are microseconds"),
    ({"weights": 0}, "a projection reads its weights as well"),
    ({"qkv": 1}, "the first projection gives q, k and v, each as wide as the model"),
    ({"hidden": 1}, "the hidden layer is four times as wide as the model"),
    ({"output_projection": False}, "attention's result goes through a projection, too"),
    ({"norms": 0}, "a layer norm is a kernel in both forms: it reads and it writes"),
    ({"norms": 1}, "there are two layer norms"),
    ({"scale": 0}, "a layer norm reads its scale, too, as many numbers as the model is wide"),
    ({"scale": 2}, "a layer norm has a scale and no shift here: there are no biases"),
    ({"one_sequence": True}, "attention stays within a sequence of the batch"),
    ({"whole_width": True}, "a head is as wide as the model divided by the heads"),
    # Not fused.
    (
        {"flash": (True, True), "gelu_apart": (False, False), "adds_apart": (False, False)},
        "that is the fused form: `fused` is False here",
    ),
    ({"flash": (True, True)}, "attention is three kernels here, which meet in memory"),
    ({"gelu_apart": (False, False)}, "GeLU is a kernel of its own here"),
    ({"adds_apart": (False, False)}, "a residual add is a kernel of its own here"),
    ({"pairs": 1 / 2}, "a matmul knows no mask: it computes all n x n scores"),
    ({"moved_pairs": 1 / 2}, "a matmul knows no mask: all n x n scores go through memory"),
    ({"pairs": 1 / 2, "moved_pairs": 1 / 2}, "a matmul knows no mask: all n x n scores count"),
    ({"softmax": 0}, "softmax is a kernel as well: it reads the scores and writes the weights"),
    ({"softmax": 1}, "softmax reads the scores and also writes the weights"),
    ({"scores": 0}, "the first product of attention writes the scores, and the second reads them"),
    ({"one_head": True}, "every head has scores of its own"),
    # A GeLU of one width moves as much less.
    ({"adds": 0}, "two residual adds are missing, or GeLU's tensors are four times as wide"),
    ({"adds": 1}, "the residual is added twice"),
    ({"add": 2}, "an addition reads two tensors and writes one"),
    # Fused.
    (
        {"flash": (False, False), "gelu_apart": (True, True), "adds_apart": (True, True)},
        "that is the form with nothing fused: `fused` is True here",
    ),
    ({"flash": (False, False)}, "attention is one kernel here, and its scores stay on the chip"),
    ({"gelu_apart": (True, True)}, "GeLU is in an epilogue here: it moves nothing of its own"),
    ({"adds_apart": (True, True)}, "residuals are added in epilogues here, not by kernels"),
    ({"fused_pairs": 1}, "this kernel knows the mask: it computes half of n x n"),
    ({"diagonal": 1}, "count half of n x n exactly, as papers do, not n (n + 1) / 2"),
    ({"fused_products": 1}, "attention has two products, also in one kernel"),
    ({"fused_inputs": 1}, "attention reads q, k and v, each as wide as the model"),
    ({"log_sum_exp": 1}, "the log-sum-exp is for a backward pass: it is not written here"),
    ({"residual": 0}, "an epilogue that adds the residual reads it from memory"),
    ({"residual": 2}, "an epilogue writes the sum in the product's place: no write besides"),
)


def block_ms(answer: Callable) -> None:
    """AssertionError unless answer(*case) is the block's time in ms in all cases.

    The answer may be any real number, NumPy's and tensors of no dimension included.
    """
    given = {case: _number(answer(*case), case) for case in _cases()}
    for case, ms in given.items():
        if not math.isclose(ms, expected := _ms(case), rel_tol=TOLERANCE):
            alike = {c: ms for c, ms in given.items() if c.fused == case.fused}
            said = f"{case} is {expected:.6g} ms, not {ms:.6g}: {_slip(alike) or _shares(case)}"
            raise AssertionError(said)


def _cases() -> Iterator[Case]:
    """The first that fails is named."""
    h200 = specs.get("H200 SXM")
    machines = (
        (h200.memory_gb_per_s, h200.peak_tflop_per_s(torch.bfloat16)),
        (20_000, 100),  # every product is bound by its FLOPs, except for one token
        (300, 2000.0),  # nothing is
    )
    shapes = (
        (4, 1024, 768, 12),  # GPT-2's smallest
        (2, 384, 640, 5),
        (1, 8192, 1024, 64),
        (3, 127, 200, 1),
        (1, 1, 4096, 32),
        (5, 33, 96, 3),
    )
    for shape, machine, fused in itertools.product(shapes, machines, (False, True)):
        yield Case(*shape, *machine, fused)


def _number(given: object, case: Case) -> float:
    number = plain(given)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise AssertionError(f"{case} needs a number of ms, not {given!r}")
    return float(number)


def _slip(given: dict[Case, float]) -> str:
    """What explains all the times of one form: a slip, or two of them."""
    for count in (1, 2):
        for slips in itertools.combinations(SLIPS, count):
            changes = {name: value for slip, _ in slips for name, value in slip.items()}
            rules = dataclasses.replace(RULES, **changes)
            if all(math.isclose(ms, _ms(c, rules), rel_tol=TOLERANCE) for c, ms in given.items()):
                return "; and ".join(hint for _, hint in slips)
    return ""


def _shares(case: Case) -> str:
    """What a case's time is made of."""
    ms = dict.fromkeys((LINEAR, ATTENTION, REST), 0.0)
    for kind, moving, computing in _times(case, RULES):
        ms[kind] += max(moving, computing)
    return "of it " + ", ".join(kind.format(time) for kind, time in ms.items())


def _ms(case: Case, rules: Rules = RULES) -> float:
    _, moving, computing = zip(*_times(case, rules), strict=True)
    if rules.together == "sum":
        return sum(moving) + sum(computing)
    if rules.together == "block":
        return max(sum(moving), sum(computing))
    return sum(map(max, moving, computing))


def _times(case: Case, rules: Rules) -> Iterator[tuple[str, float, float]]:
    """Of each operation its kind, and the ms that moving and computing take."""
    for kind, numbers, multiply_adds in _operations(case, rules):
        moving = numbers * rules.number / (case.gb_per_s * rules.giga)
        computing = multiply_adds * rules.multiply_add / (case.tflop_per_s * rules.tera)
        yield kind, moving * rules.second, computing * rules.second


def _operations(case: Case, rules: Rules) -> Iterator[tuple[str, float, float]]:
    """Of each operation its kind, the numbers that it moves, and its multiply-adds."""
    tokens, width, fused = case.batch * case.sequence, case.width, case.fused
    stream = tokens * width
    for _ in range(rules.norms):
        yield REST, 2 * stream + rules.scale * width, 0

    added = 0 if rules.adds_apart[fused] else rules.residual * stream
    linear = [(1, rules.qkv, 0), (1, rules.hidden, 0), (rules.hidden, 1, added)]
    if rules.output_projection:
        linear.append((1, 1, added))
    for inputs, outputs, more in linear:  # in widths
        weights = inputs * outputs * width**2
        moved = (inputs + outputs) * stream + rules.weights * weights + more
        yield LINEAR, moved, tokens * weights

    keys = tokens if rules.one_sequence else case.sequence
    every_pair = tokens * keys  # of a query and a key
    product = every_pair * width * (case.heads if rules.whole_width else 1)
    if rules.flash[fused]:
        half = rules.fused_pairs * (1 + rules.diagonal / keys)
        kept = 2 * rules.log_sum_exp * tokens * case.heads  # fp32, in numbers of 16 bits
        moved = (rules.fused_inputs + 1) * stream + kept
        yield ATTENTION, moved, rules.fused_products * half * product
    else:
        scores = rules.moved_pairs * every_pair * (1 if rules.one_head else case.heads)
        yield ATTENTION, rules.softmax * scores, 0
        for _ in ("QKᵀ", "PV"):
            yield ATTENTION, 2 * stream + rules.scores * scores, rules.pairs * product

    if rules.adds_apart[fused]:
        for _ in range(rules.adds):
            yield REST, rules.add * stream, 0
    if rules.gelu_apart[fused]:
        yield REST, 2 * rules.hidden * stream, 0
