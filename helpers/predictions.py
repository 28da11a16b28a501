"""Predicted beside measured: the roofline's time for every operation that this course timed.

The work is that of `helpers.counted_records` and `helpers.counted_curves`; roofs and the smallest
kernel are the machine's own.
"""

import itertools
import re

from helpers import roofline
from helpers.counted_curves import clock_of, of_curves
from helpers.counted_records import MS, Timed, of_records
from helpers.machines import Machine
from helpers.roofline import FACTOR

COLUMNS = "notebook claim op shape dtype clock predicted_ms ms ratio bound note".split()
CPU_NOTE = "a CPU: caches, exp and the hand-over between threads cost too (03 §4)"
NOTES = (  # pattern of "notebook operation shape clock", and what has been shown: notebook §section
    (" host$", "the host's clock: launch and wait are in it (02 §4)"),
    ("matmul (32|128|512)x", "too little work to fill the machine (03 §4)"),
    ("sum, ", "left open: a copy of as many bytes takes what is predicted (02 §4)"),
    (r"cuda_gelu(, naive)? \d|gelu_naive", "arithmetic in fp64, 4 bytes a thread (05 §6)"),
    ("gelu_float, ", "4 bytes a thread: too few under way (05 §6)"),
    ("matmul_rows", "lanes along rows: 33 sectors a step, not 5 (06 §6)"),
    ("matmul_(columns|shared)", "two numbers from the SRAM a multiply-add (06 §7)"),
    ("matmul_registers 25[67]x256x", "four or six tiles for all SMs (06 §9)"),
    ("matmul_registers 257x", "a third row of tiles, nearly empty (06 §9)"),
    ("transpose, tile, 32 wide", "all lanes want one bank (06 §8)"),
    ("transpose", "one of its two sides strides (06 §8)"),
    ("03_roofline (softmax|layer norm)", "a row is seen before its first output (03 §4)"),
    (
        r"softmax\(a\+b\)|pytorch_softmax",
        "PyTorch's softmax takes more than its bytes (08 §8)",
    ),
    ("cross entropy", "writes all log-probabilities to pick a few (03 §4)"),
    ("times a batch [24] ", "2 or 4 vectors take longer than 1 or 8 (03 §5)"),
    ("sigmoids, fused", "exponentials: an SM makes 16 a cycle (04 §2)"),
    (r"(simple|compiled)_gelu \d*[13579] ", "an odd size: narrow accesses (07 §6)"),
    ("a launch for each|loop along K", "nothing is loaded ahead of time (09 §4)"),
    ("09_matmul .*x256 ", "short K: first loads and epilogue show (09 §7)"),
    (r"rows of 50304 \S*x502(57|58|60)x", "looks at sizes, not at rows (10 §7)"),
    ("x502(57|58|60)x", "no multiple of 16 bytes: an older kernel (10 §4, §7)"),
    (
        "backward, standard",
        "left open: the mask's gradient, beside softmax's in two kernels (11 §12)",
    ),
    (
        "attention, standard|: (mask|softmax)",
        "mask, softmax: slower than their bytes (11 §2)",
    ),
    ("one kernel", "exponentials, dropout, half-hidden tiles (11 §3)"),
    ("FlashAttention-2|-efficient", "made for older GPUs: tensor cores wait (11 §11)"),
    ("FlexAttention", "products and exponentials in turn (11 §6, §11)"),
    ("attention, .* causal", "short, causal: tiles that the diagonal cuts (11 §10)"),
    ("backward, .*x64 ", "heads of 64: an exponential outweighs a product (12 §8)"),
    ("backward, ", "short: starts, ends, tiles on the diagonal (11 §10, 12 §6)"),
)


def predictions(machine: Machine):
    """A pandas frame, an operation, shape, dtype and clock a row; empty without roofs of its own.

    predicted_ms: smallest kernel + max(bytes / copy's rate, FLOPs / matmul's rate). The smallest
    kernel is the addition of two 32 x 32 matrices on the same clock, or 0 where that was not timed.
    ratio: ms / predicted_ms. bound: "memory", "compute", or "launch" where the smallest kernel is
    more than half of the prediction. note: why, where the ratio is above FACTOR and the collection
    has an answer, found on the recorded H200; else "".
    """
    import pandas as pd

    copied = machine.copy_gb_per_s()
    rows = []
    for timed in itertools.chain(of_records(machine), of_curves(machine)) if copied else ():
        top = machine.matmul_tflop_per_s(timed.arithmetic)
        if top is None:
            continue
        floor = _floor_ms(machine, timed.clock)
        predicted = roofline.predict_ms(timed.work, copied, top, floor)
        memory = timed.work.bytes / copied >= timed.work.flops / top / 1000
        bound = "launch" if floor > predicted / 2 else "memory" if memory else "compute"
        ratio = timed.ms / predicted
        rows.append((*timed[:6], predicted, timed.ms, ratio, bound, _note(machine, timed, ratio)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _floor_ms(machine: Machine, clock: str) -> float:
    for unit, scale in MS.items():
        found = machine.value("L08", "add", shape="32x32", clock=clock, unit=unit)
        if found is not None:
            return found * scale
    return 0.0


def is_outlier(ratio):
    """Of a number or of a pandas series of them."""
    return (ratio > FACTOR) | (ratio < 1 / FACTOR)


def _note(machine: Machine, timed: Timed, ratio: float) -> str:
    if not ratio > FACTOR:
        return ""
    if clock_of(machine) == "host":
        return CPU_NOTE
    named = f"{timed.notebook} {timed.op} {timed.shape} {timed.clock}"
    return next((note for pattern, note in NOTES if re.search(pattern, named)), "")
