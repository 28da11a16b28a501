"""The numbers that lecture 6 states and prints, each with what is found here.

As `helpers.statements_slides`; the exercises that follow the lectures are here too.
"""

from helpers import statement_models as model
from helpers import traffic, waves
from helpers.statement_models import A100, FLOAT, H100, RTX_4080
from helpers.verdict_rules import (
    ROUNDED,
    Statement,
    counted,
    first,
    over,
    record,
    series,
    share_of_memory,
    travels,
    unmeasured,
)

ONE_GPU = "one is recorded"
ADVICE = "it is advice"
HOST = "the host takes longer than the kernel"
LAUNCHES = "the CPU, which launches many small kernels, takes the time"
SHORT = "so short a kernel is all start"
STOPWATCH = "the host clock there adds more"
LIKELY = "the host clock there likely adds more, as it does to GeLU"
ITS_OWN = "its printout differs too"
DOUBLES = "only the memory is faster here"
BOTH_READ = "the division reads the M sums as well"
INDICES = "max also writes M indices of 8 bytes"
TWO_NUMBERS = "each multiply-add needs a number of A and one of B"
SHEET = {"by": "datasheet", "within": ROUNDED}
PERCENT = {"unit": "%"}
GELU = traffic.gelu(2**28, FLOAT)  # 16384 x 16384
HOSTS, KERNELS = {"unit": "ms", "clock": "host"}, {"unit": "us", "clock": "kernel"}
MLP = "mlp forward+backward"


def gelus(rows: str, a: str, b: str, clock: dict):
    """The time of one way over another's; recorded under the first of these rows that has it."""
    return over(*(record(rows, f"{way}_gelu", **clock) for way in (a, b)))


def softmaxes(way: str) -> Statement:
    manual, time = (record("L23", f"{name}_softmax", **HOSTS) for name in ("manual", way))
    if way == "triton":  # the lecture's kernel is called row_softmax here
        time = first(record("L23", "row_softmax", **HOSTS), time)
    return travels("L23", f"manual / {way}, host", over(manual, time), unit="", because=LIKELY)


def mlp(steps: int = 2, layers: int = 4, batch: int = 256, dim: int = 256):
    shape = f"steps={steps} layers={layers} batch={batch} dim={dim}"
    return record("L07", MLP, shape=shape, **HOSTS)


def grown(what: str, quantity) -> Statement:
    return travels("L07", f"{what}, × the first", over(quantity, mlp()), unit="")


def times_add(op: str) -> Statement:
    """How many additions of the same matrices something takes."""
    times = record("L10", op, **KERNELS), record("L09", "add", **KERNELS)
    return travels("L10", f"{op} / add", over(*times), unit="")


STATEMENTS = (
    counted("L01", "H100: SMs", record("L01", "SMs", ""), lambda: H100.sms, **SHEET),
    counted("L01", "H100: L2", record("L01", "L2", "MB"), lambda: H100.l2_mb, unit="MB", **SHEET),
    counted(
        "L01",
        "H100: memory",
        record("L01", "memory", "MB"),
        lambda: H100.memory_gb * 2**10,
        unit="MB",
        **SHEET,
    ),
    counted("L01", "H100: cc", "9.0", lambda: H100.compute_capability, **SHEET),
    counted("L01", "A100: SMs", 108, lambda: A100.sms, **SHEET),
    counted("L01", "A100: DRAM", 80, lambda: A100.memory_gb, unit="GB", **SHEET),
    counted("L01", "A100: L2", 40, lambda: A100.l2_mb, unit="MB", **SHEET),
    counted("L01", "A100: L1", 192, lambda: A100.l1_kb_per_sm, unit="KB", **SHEET),
    counted("L01", "A100: shared", 164, lambda: A100.shared_kb_per_sm, unit="KB", **SHEET),
    unmeasured("L01", "H100s", 8, "", ONE_GPU),
    unmeasured("L03", "blocks / SMs", 4, "", ADVICE),
    travels("L05", "sleep", record("L05", "sleep", "ms"), within=0.02),
    *(
        travels(
            "L06",
            f"matmul({n})",
            record("L06", "matmul", **HOSTS, shape=f"{n}x{n}x{n}"),
            because=HOST,
        )
        for n in (1024, 2048, 4096, 8192, 16384)
    ),
    *(grown(f"{k} times the steps", mlp(steps=2 * k)) for k in (2, 3, 4, 5)),
    *(grown(f"{k} times the layers", mlp(layers=4 * k)) for k in (2, 3, 4, 5)),
    *(grown(f"{k} times the batch", mlp(batch=256 * k)) for k in (2, 3, 4, 5)),
    *(grown(f"{k} times the width", mlp(dim=256 * k)) for k in (2, 3, 4, 5)),
    travels("L07", "MLP, the first", mlp(), because=LAUNCHES),
    travels(
        "L09",
        "add, of the memory's rate",
        share_of_memory(record("L09", "add", **KERNELS), traffic.add(2048**2, FLOAT)),
        **PERCENT,
    ),
    travels("L09", "matmul(2048)", record("L09", "matmul", **KERNELS, shape="2048x2048x2048")),
    Statement("L09", "its tile", "256x128", series("02_benchmarking", "kernels", model.named_tile)),
    travels(
        "L09",
        "matmul(128)",
        record("L09", "matmul", **KERNELS, shape="128x128x128"),
        because=SHORT,
    ),
    travels("L10", "cdist", record("L10", "cdist", **KERNELS)),
    times_add("gelu(a+b)"),
    times_add("softmax(a+b)"),
    travels("L10", "MLP, device", record("L10", MLP, **KERNELS)),
    Statement(
        "L10",
        "MLP, CPU / device",
        over(record("L10", MLP, "us", clock="cpu"), record("L10", MLP, **KERNELS)),
        over(
            record("L10", f"{MLP}, CPU without waiting", "us", clock="cpu"),
            record("L10", MLP, **KERNELS),
        ),
    ),
    counted("L12", "GeLU(1)", 0.8412, model.gelu_of_one, by="computed", within=1e-4),
    travels("L12", "manual / PyTorch, kernels", gelus("L12", "manual", "pytorch", KERNELS)),
    travels(
        "L12", "manual / PyTorch, host", gelus("L12", "manual", "pytorch", HOSTS), because=STOPWATCH
    ),
    travels("L15", "CUDA's kernel", record("L15 L19", "cuda_gelu", **KERNELS)),
    travels(
        "L15",
        "CUDA / PyTorch, kernels",
        over(record("L15 L19", "cuda_gelu", **KERNELS), record("L12", "pytorch_gelu", **KERNELS)),
        because=DOUBLES,
    ),
    travels(
        "L15", "CUDA / PyTorch, host", gelus("L15 L19", "cuda", "pytorch", HOSTS), because=STOPWATCH
    ),
    travels(
        "L15",
        "manual / PyTorch, host",
        gelus("L15 L19", "manual", "pytorch", HOSTS),
        because=STOPWATCH,
    ),
    counted("L18", "elements a thread", 8, lambda: 1024 // (4 * waves.WARP)),
    travels(
        "L19",
        "Triton, of the memory's rate",
        share_of_memory(record("L19", "triton_gelu", **KERNELS), GELU),
        **PERCENT,
    ),
    Statement(
        "L19",
        "Triton / CUDA, in words",
        1,
        over(record("L19", "triton_gelu", **KERNELS), record("L19", "cuda_gelu", **KERNELS)),
        bound="over",
        within=0,
        because=ITS_OWN,
    ),
    travels("L19", "Triton / CUDA, host", gelus("L19", "triton", "cuda", HOSTS), because=STOPWATCH),
    travels(
        "L19", "manual / PyTorch, host", gelus("L19", "manual", "pytorch", HOSTS), because=STOPWATCH
    ),
    Statement(
        "L20",
        "kernel",
        "triton_poi_fused_add_mul_tanh_0",
        series("07_triton_gelu", "generated", model.generated_kernel),
    ),
    travels(
        "L20",
        "compiled, of the memory's rate",
        share_of_memory(record("L20", "compiled_gelu", **KERNELS), GELU),
        **PERCENT,
    ),
    travels("L20", "compiled / PyTorch, host", gelus("L20 L19", "compiled", "pytorch", HOSTS)),
    travels(
        "L20",
        "manual / compiled, host",
        gelus("L20 L19", "manual", "compiled", HOSTS),
        because=STOPWATCH,
    ),
    travels(
        "L20", "Triton / CUDA, host", gelus("L20 L19", "triton", "cuda", HOSTS), because=STOPWATCH
    ),
    *(
        counted("L21", what, stated, lambda what=what: model.softmax_accesses()[what], because=why)
        for what, stated, why in (
            ("reads, MN", 5, ""),
            ("writes, MN", 3, ""),
            ("reads, M", 1, BOTH_READ),
            ("writes, M", 2, INDICES),
        )
    ),
    counted(
        "L21",
        "times what is needed",
        4,
        lambda: model.softmax_bytes() / model.softmax_bytes(manual=False),
        unit="×",
        within=0.001,
    ),
    counted("L22", "first row", 1 / 3, lambda: model.softmax_of(5.0, 5, 5)[0], within=1e-4),
    counted(
        "L22", "second row, first", 3.78e-44, lambda: model.softmax_of(0.0, 0, 100)[0], within=0.001
    ),
    counted("L22", "second row, last", 1, lambda: model.softmax_of(0.0, 0, 100)[2]),
    softmaxes("compiled"),
    softmaxes("pytorch"),
    softmaxes("triton"),
    counted("L25", "reads / MKN", 1, lambda: model.naive_matmul(False), because=TWO_NUMBERS),
    counted("L25", "writes / MN", 1, lambda: model.naive_matmul(True)),
    counted("L26", "blocks row by row", 90, lambda: model.blocks_of_nine_tiles(1)),
    counted("L26", "blocks in groups", 54, lambda: model.blocks_of_nine_tiles(3)),
    counted(
        "X1",
        "first tooth of an RTX 4080",
        2048,
        lambda: waves.first_tooth(int(RTX_4080.sms), 256, 128),
        bound="at most",
    ),
    counted("X4", "RTX 4080", 716.8, lambda: RTX_4080.memory_gb_per_s, unit="GB/s", by="datasheet"),
)
