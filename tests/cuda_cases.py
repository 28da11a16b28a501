"""A case for every CUDA kernel of helpers/kernels: how to launch it, and what must come out."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from helpers import cuda

FLOAT_SIZES = (1, 31, 1023, 1025)
BLOCK = 64  # several blocks for most sizes, and none of the sizes that kernels are tuned for
TANHF_ERROR = 2**-10.987  # of __tanhf, relative: CUDA programming guide, mathematical functions
# Half a unit in the last place, and a little for the fp32 before it.
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
SCALARS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch. expected: the position of an argument -> its contents afterwards, in float64."""

    grid: int | tuple
    block: int | tuple
    arguments: tuple
    expected: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel with one set of macros.

    launch: (size, device) -> a Launch with its tensors there. tolerance: relative error in the
    emulator; gpu_tolerance: on a GPU, where an intrinsic is less exact.
    """

    file: str
    kernel: str
    sizes: tuple
    launch: Callable[[object, torch.device], Launch]
    defines: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-6
    gpu_tolerance: float | None = None

    def __str__(self):
        return "-".join((self.kernel, *(value for _, value in self.defines)))

    def load(self) -> cuda.Kernel:
        return cuda.load(self.file, self.kernel, **dict(self.defines))


def numbers(n: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def placed(values: torch.Tensor, device: torch.device, offset: int = 0) -> torch.Tensor:
    """The values on a device, `offset` elements behind an aligned address."""
    whole = torch.zeros(values.numel() + offset, dtype=values.dtype, device=device)
    whole[offset:] = values.flatten().to(device)
    return whole[offset:].view(values.shape)


def unwritten(like: torch.Tensor) -> torch.Tensor:
    fill = torch.nan if like.is_floating_point() else -1
    return torch.full_like(like, fill)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """By its definition, in float64."""
    x = x.double().cpu()
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def elementwise(
    formula: Callable, per_thread: int = 1, dtype=torch.float32, aligned: bool = False, extra=()
) -> Callable:
    """Launches of kernel(x, y, n, *extra); where the kernel allows it, x and y are misaligned."""

    def launch(n: int, device: torch.device) -> Launch:
        values = numbers(n).to(dtype)
        x = placed(values, device, 0 if aligned else 1)
        y = placed(unwritten(values), device, 0 if aligned else 3)
        blocks = -(-n // (BLOCK * per_thread))
        return Launch(blocks, BLOCK, (x, y, n, *extra), {0: values, 1: formula(values)})

    return launch


def gelu_steps() -> Iterator[Case]:
    naive = elementwise(gelu)
    yield Case("gelu_steps.cu", "gelu_naive", FLOAT_SIZES, naive, tolerance=1e-7)
    kernels = {"gelu_float": 1, "gelu_float4": 4, "gelu_four": 4}
    for (kernel, per_thread), form in itertools.product(
        kernels.items(), ("exact", "fast", "logistic", "nothing")
    ):
        formula = torch.Tensor.double if form == "nothing" else gelu
        yield Case(
            "gelu_steps.cu",
            kernel,
            FLOAT_SIZES,
            elementwise(formula, per_thread, aligned=kernel == "gelu_float4"),
            (("FORM", form),),
            tolerance=0 if form == "nothing" else 1e-6,
            gpu_tolerance=TANHF_ERROR if form == "fast" else None,
        )


def gelu_kernel() -> Iterator[Case]:
    for dtype, scalar in SCALARS.items():
        for vector_bytes in (dtype.itemsize, 16):
            width = vector_bytes // dtype.itemsize
            yield Case(
                "gelu.cu",
                "gelu_kernel",
                FLOAT_SIZES,
                elementwise(gelu, width, dtype, aligned=width > 1),
                (("scalar", scalar), ("vector_bytes", str(vector_bytes))),
                tolerance=ROUNDING[dtype],
            )


def who_am_i(size: tuple[int, int], device: torch.device) -> Launch:
    rows, columns = size
    block_x, block_y = block = (8, 6)
    grid = (-(-columns // block_x), -(-rows // block_y))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    place = row % block_y * block_x + column % block_x
    expected = torch.stack((column // block_x, row // block_y, place, place // 32), dim=-1)
    who = placed(unwritten(expected.int()), device)
    return Launch(grid, block, (who, rows, columns), {0: expected})


def branches(size: tuple[int, int, int], device: torch.device) -> Launch:
    ways, span, steps = size
    blocks = 3
    branch = torch.arange(blocks * BLOCK, dtype=torch.float64) // span % ways
    v = torch.zeros_like(branch)
    for _ in range(steps):
        v = v * (0.5 + 0.01 * branch) + (1 + 0.1 * branch)
    return Launch(blocks, BLOCK, (placed(unwritten(v.float()), device), ways, span, steps), {0: v})


def slide(size: tuple[int, int], device: torch.device) -> Launch:
    split, steps = size
    expected = torch.arange(32, dtype=torch.float64)
    for lane in range(32):
        for step in (0, 1, 4) if lane < split else (2, 3, 4):
            for _ in range(steps):
                expected[lane] = expected[lane] * 0.5 + 1 + step
    clocks = [torch.full((5, 32), -1, device=device) for _ in range(2)]
    y = placed(unwritten(expected.float()), device)
    return Launch(1, 32, (*clocks, y, split, steps), {2: expected})


def long_branch(x: torch.Tensor) -> torch.Tensor:
    v = x.double()
    for _ in range(3):
        v = torch.where(x < 0, v * v + 0.1, v)
    return v


def handshake(patience: int, device: torch.device) -> Launch:
    flag, answered = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 2))
    return Launch(1, 2, (flag, answered, patience), {0: torch.full((1,), 2), 1: torch.ones(2)})


def divergence() -> Iterator[Case]:
    file = "divergence.cu"
    shapes = tuple(itertools.product((1, 3, 32), (1, 32), (0, 5)))
    yield Case(file, "branches", shapes, branches)
    yield Case(file, "slide", ((0, 2), (1, 4), (20, 3), (32, 1)), slide)
    short = elementwise(lambda x: torch.where(x < 0, 0.1 * x.double(), x.double()))
    yield Case(file, "short_branch", FLOAT_SIZES, short)
    yield Case(file, "long_branch", FLOAT_SIZES, elementwise(long_branch, extra=(3,)))
    yield Case(file, "handshake", (100_000,), handshake)


def elsewhere() -> Iterator[Case]:
    """The cases that stand in files of their own, which import this one."""
    from matmul_cases import matmul
    from memory_cases import memory
    from schedule_cases import schedule
    from transpose_cases import transposes

    yield from matmul()
    yield from memory()
    yield from schedule()
    yield from transposes()


CASES = (
    *gelu_steps(),
    *gelu_kernel(),
    Case("threads.cu", "who_am_i", ((1, 1), (6, 8), (13, 31), (31, 13)), who_am_i),
    *divergence(),
    *elsewhere(),
)
