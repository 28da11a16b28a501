"""The numbers that lecture 5's slides state, each with what is found here (`helpers.verdicts`).

A stated number is that of the row's claim in data/lecture_map.csv, or a record of the lecture's
(data/lecture_measurements.csv). Ours are records, or the models that the row's section uses.
"""

import math

from helpers import alignment, anatomy, traffic, waves
from helpers import statement_models as model
from helpers.statement_models import A100, A100_40GB, FLOAT, HALF
from helpers.verdict_rules import (
    ROUNDED,
    Quantity,
    Statement,
    counted,
    over,
    record,
    scaled,
    series,
    travels,
    unmeasured,
)

FIT = "the curve is a fit through many trained language models"
COMPARES = "it compares chips many years apart"
SLOWED = "its growth slowed down and did not stop"
AN_A100 = "slide 10 quotes an A100"
NOT_TIMED = "neither is a wait that a program can time"
GRADIENT = "the backward pass also reads the gradient that comes from above"
OF_NINE = "the accesses of slide 31 are 9"
FETCHED = "an H200's L2 fetches 64 bytes at a miss unless told to fetch 128"
ANOTHER_GPU = "the tweet names no GPU, and what odd rows cost differs between them"
ALIGNED = "from 8 numbers of 16 bits on every load is aligned"
PASSES = {"because": "GPU and kernels are others; 18 passes and 12 tensors would be 40.3"}
KEYS_OUTER = {"because": "the paper's outer loop over keys moves more"}
PARTLY = "slide 10 quotes an A100, whose clock explains a part"
NO_COUNT = "no usual count fits"
CORE = "beside the products for Q, K and V there are two in the core"
LINK = "that is one channel of DDR4-1600"
TREND = {"unit": "×", "by": "fitted", "within": 0.15}
FACTOR = {"unit": "×", "by": "computed", "within": 0.02}
SHEET = {"by": "datasheet", "within": ROUNDED}


def latency(level: str, chain: str = "", because: str = "") -> Statement:
    """Cycles; of L1 and shared memory by a chain of addresses, as those of the slide's source."""
    ops = f"latency, {level}", f"latency, {level}{chain}"
    stated, found = (record("S10", op, "cycles") for op in ops)
    return Statement("S10", level, stated, found, "cycles", because=because)


def float_bytes(way: str = "") -> Quantity:
    """Bytes that move for one float in 128: what it costs beside a float among neighbours."""
    return scaled(record("S34", f"cost of a float at stride 32, from memory{way}", "x"), 4)


def accesses(what: str, stated: float, of, anew: bool = False, because: str = "") -> Statement:
    """A count of slide 31's sigmoids; anew: of slide 32's, computed once more in the backward."""
    found = lambda: of(model.sigmoid_accesses(anew))  # noqa: E731
    return counted("S32" if anew else "S31", what, stated, found, because=because)


def divisor(more: int, fewer: int) -> Statement:
    """How much faster a matmul is whose N is divisible by the larger power of two."""
    rates = (record("S43", f"matmul, N divisible by {d}", "TFLOP/s") for d in (more, fewer))
    what, limit = f"speed (K = {more} / {fewer})", {"bound": "over", "within": 0.02}
    return Statement("S43", what, 1, over(*rates), "×", because=ALIGNED, **limit)


def flash(form: str, unit: str, clock: str, what: str = "") -> Quantity:
    return record("S46", f"{what}{form}, forward and backward", unit, clock=clock)


STATEMENTS = (
    unmeasured("S05", "factor", 2.57, "", FIT),
    unmeasured("S05", "exponent", -0.048, "", FIT),
    counted(
        "S06",
        "from 2005 on, in 2 years: transistors",
        2,
        lambda: model.cpu_growth("transistors"),
        **TREND,
    ),
    counted("S06", "clock", 1, lambda: model.cpu_growth("clock"), **TREND),
    counted("S06", "single thread", 1, lambda: model.cpu_growth("single"), because=SLOWED, **TREND),
    counted("S07", "their product", 1000, lambda: math.prod((16, 12.5, 2.5, 2)), **FACTOR),
    unmeasured("S07", "numbers", 16, "×", COMPARES),
    unmeasured("S07", "instructions", 12.5, "×", COMPARES),
    unmeasured("S07", "process", 2.5, "×", COMPARES),
    unmeasured("S07", "sparsity", 2, "×", COMPARES),
    counted("S09", "SMs on the die", 128, lambda: anatomy.full_die_sms(A100), by="datasheet"),
    counted("S09", "SMs of an A100", 108, lambda: A100.sms, by="datasheet"),
    latency("L1", ", by address"),
    latency("shared memory", ", by address"),
    latency("L2", because=AN_A100),
    latency("memory", because=PARTLY),
    travels("S10", "bandwidth, SRAM / DRAM", record("S10", "bandwidth, SRAM / DRAM", "×")),
    unmeasured("S10", "store", 19, "cycles", NOT_TIMED),
    unmeasured("S10", "price of SRAM", 100, "×", NOT_TIMED),
    counted("S11", "threads of a warp", 32, lambda: waves.WARP, by="CUDA's guide"),
    travels(
        "S16",
        "bf16 matmul / multiply-adds",
        record("S16", "matmul / multiply-adds", "×", dtype="bfloat16"),
        bound="over",
        within=0,
    ),
    counted("S17", "FLOP/s in 2 years", 3, lambda: 60_000 ** (2 / 20), **FACTOR),
    counted("S17", "DRAM in 2 years", 1.6, lambda: 100 ** (2 / 20), **FACTOR),
    counted("S17", "interconnect in 2 years", 1.4, lambda: 30 ** (2 / 20), **FACTOR),
    unmeasured("S17", "in 20 years: FLOP/s", 60_000, "×", COMPARES),
    unmeasured("S17", "DRAM in 20 years", 100, "×", COMPARES),
    unmeasured("S17", "interconnect in 20 years", 30, "×", COMPARES),
    *(
        counted(
            "S24",
            f"{name}, bytes per FLOP",
            record("S24", "relu, bytes per FLOP", "", dtype=name),
            lambda dtype=dtype: 1 / traffic.relu(1024, dtype).intensity,
        )
        for name, dtype in (("float32", FLOAT), ("float16", HALF))
    ),
    Statement("S28", "kernels", 5, record("S28", "kernels", ""), within=0),
    Statement("S29", "kernels", 1, record("S29", "kernels", ""), within=0),
    accesses("forward: reads", 1, lambda counts: counts[0]),
    accesses("forward: writes", 3, lambda counts: counts[1]),
    accesses("backward: writes", 1, lambda counts: counts[3]),
    accesses("backward: reads", 3, lambda counts: counts[2], because=GRADIENT),
    accesses("accesses", 8, sum, because=GRADIENT),
    accesses("forward: reads", 1, lambda counts: counts[0], anew=True),
    accesses("forward: writes", 1, lambda counts: counts[1], anew=True),
    accesses("backward: reads", 2, lambda counts: counts[2], anew=True),
    accesses("backward: writes", 1, lambda counts: counts[3], anew=True),
    accesses("accesses", 5, sum, anew=True),
    accesses(
        "share of slide 31's",
        5 / 8,
        lambda counts: sum(counts) / sum(model.sigmoid_accesses(False)),
        anew=True,
        because=OF_NINE,
    ),
    Statement(
        "S33",
        "memory",
        4,
        scaled(record("L01", "memory", "MB", clock="model"), 2**-10),
        "GB",
        bound="at least",
    ),
    Statement(
        "S33",
        "section, if asked for,",
        128,
        float_bytes(", 128 bytes a miss"),
        "bytes",
    ),
    Statement("S33", "section", 128, float_bytes(), "bytes", bound="at least", because=FETCHED),
    counted("S34", "requests, lanes side by side", 1, lambda: model.lines_touched("lane")),
    counted("S38", "reads of each (N = 64)", 64, lambda: model.loads_of_each(64, 1)),
    counted("S38", "reads of each, tiles of 16", 64 / 16, lambda: model.loads_of_each(64, 16)),
    counted("S39", "tiles (256)", 4, lambda: waves.tiles(256, 256, 128, 128)),
    counted("S39", "tiles (257)", 9, lambda: waves.tiles(257, 257, 128, 128)),
    counted("S39", "tiles (257), nearly empty", 5, lambda: model.nearly_empty(257, 128)),
    counted("S40", "sections of an aligned row", 1, lambda: model.lines_touched("lane")),
    counted("S40", "sections of a misaligned row", 2, lambda: model.lines_touched("lane + 1")),
    counted("S41", "padded vocabulary", 50304, lambda: alignment.round_up(50257, 64)),
    travels(
        "S41",
        "step (50257 / 50304)",
        record("S41", "training step, 50257 / 50304", "×"),
        because=ANOTHER_GPU,
    ),
    divisor(8, 2),
    divisor(16, 8),
    divisor(32, 16),
    divisor(128, 32),
    *(
        counted(
            "S44",
            f"tiles ({n})",
            record("S44", "tiles of 256x128", "", shape=f"{n}x{n}"),
            lambda n=n: waves.tiles(n, n, 256, 128),
        )
        for n in (1792, 1793)
    ),
    counted("S44", "SMs of an A100", 108, lambda: A100.sms, by="datasheet"),
    counted("S44", "waves of 120 tiles", 2, lambda: waves.waves(120, int(A100.sms))),
    travels(
        "S46",
        "standard / Flash",
        over(flash("standard", "ms", "event"), flash("one kernel", "ms", "event")),
    ),
    travels("S46", "standard GB", flash("standard", "GB", "counter", "DRAM bytes, "), **PASSES),
    travels("S46", "Flash GB", flash("one kernel", "GB", "counter", "DRAM bytes, "), **KEYS_OUTER),
    counted(
        "S46",
        "standard GFLOP",
        flash("standard", "", "model", "FLOPs, "),
        lambda: model.attention_gflop(False),
        because=NO_COUNT,
    ),
    counted(
        "S46",
        "Flash GFLOP",
        flash("one kernel", "", "model", "FLOPs, "),
        lambda: model.attention_gflop(True),
        because=NO_COUNT,
    ),
    counted("S47", "matmuls", 3, model.attention_matmuls, because=CORE),
    counted(
        "S48", "SRAM", 20, lambda: A100_40GB.sms * A100_40GB.l1_kb_per_sm / 1e3, unit="MB", **SHEET
    ),
    counted("S48", "SRAM's rate", 19, lambda: model.sram_tb_per_s(A100_40GB), unit="TB/s", **SHEET),
    counted("S48", "HBM", 40, lambda: A100_40GB.memory_gb, unit="GB", **SHEET),
    counted(
        "S48", "HBM's rate", 1.5, lambda: A100_40GB.memory_gb_per_s / 1e3, unit="TB/s", **SHEET
    ),
    Statement(
        "S48",
        "CPU DRAM's",
        12.8,
        record("S48", "pyramid, CPU's DRAM", "GB/s"),
        "GB/s",
        because=LINK,
    ),
    unmeasured("S48", "CPU DRAM over", 1, "TB", "that is bought"),
    Statement(
        "S49",
        "looks at a row",
        2,
        series("08_softmax", "looks", model.online_looks),
        within=ROUNDED,
    ),
)
