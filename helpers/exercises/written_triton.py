"""What the checkers of Triton kernels that a reader writes have in common.

An answer is called with its inputs and outputs, all of them guarded, and watched meanwhile.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch

from helpers import ptx
from helpers.check import CannotCheck
from helpers.device import interpreting, synchronize
from helpers.exercises.triton_watch import Guarded, Launch, Watch
from helpers.exercises.written_kernels import UNWRITTEN

ARCH = "sm_90"


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call did.

    outputs: by name, on the CPU. reads, writes: how often each element of a tensor was touched, by
    the tensor's name, and widest: the longest side of a block that was loaded or stored at once;
    None for a compiled kernel, which cannot be watched.
    """

    outputs: dict[str, torch.Tensor]
    launches: tuple[Launch, ...]
    reads: dict[str, np.ndarray] | None
    writes: dict[str, np.ndarray] | None
    widest: int | None


def run(
    answer: Callable,
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, tuple[int, ...]],
    where: str,
) -> Run:
    """answer(*inputs, *outputs): contiguous tensors on this machine's device, inputs copied there.

    outputs: their shapes; their dtype is the first input's. AssertionError, which begins with
    `where`, for PyTorch's arithmetic, for no launch, for a kernel that touches what is not its own,
    changes an input or leaves a part of an output unwritten.
    """
    dtype = next(iter(inputs.values())).dtype
    guarded = [Guarded(name, x.shape, x.dtype, torch.nan, x) for name, x in inputs.items()]
    made = [Guarded(name, shape, dtype, UNWRITTEN) for name, shape in outputs.items()]
    watch = Watch([*guarded, *made], set(outputs), where)
    before = [each.whole.clone() for each in guarded]
    try:
        with watch.everything(), np.errstate(all="ignore"):  # a GPU warns of no overflow either
            answer(*(each.tensor for each in watch.guarded))
        synchronize()
    except ptx.ToolMissing as reason:
        raise CannotCheck(reason) from None
    except Exception as error:
        if watch.fault:  # the interpreter wraps what is raised inside a kernel
            raise AssertionError(watch.fault) from None
        if isinstance(error, AssertionError) and not str(error):
            raise AssertionError(f"{where} an assert of its own fails") from error
        if hint := _explained(error):
            raise AssertionError(f"{where} {hint}") from error
        raise
    for each, old in zip(guarded, before, strict=True):
        if not torch.equal(each.whole.view(torch.uint8), old.view(torch.uint8)):
            raise AssertionError(f"{where} it changes {each.name}, which is an input")
    for each in made:
        each.assert_margins(where)
    results = {each.name: each.tensor.cpu() for each in made}
    if not watch.launches and any(y.numel() for y in results.values()):
        raise AssertionError(f"{where} no Triton kernel is launched")
    for name, y in results.items():
        if (unwritten := y == torch.tensor(UNWRITTEN, dtype=dtype)).any():
            raise AssertionError(
                f"{where} nothing is written to {name}{unwritten.nonzero()[0].tolist()}: do the "
                f"blocks together reach all {y.numel():,} elements?"
            )
    for launch in watch.launches:
        if 0 in launch.grid:
            raise AssertionError(
                f"{where} a grid of {launch.grid} is launched: CUDA refuses a grid of no blocks; "
                "where there is nothing to do, launch nothing"
            )
    if not interpreting():
        return Run(results, tuple(watch.launches), None, None, None)
    shapes = {each.name: each.tensor.shape for each in watch.guarded}
    reads, writes = (
        {name: times.reshape(shapes[name]) for name, times in watch.counts[doing].items()}
        for doing in ("reads", "writes")
    )
    for name in outputs:
        if (by_others := writes[name] == 0).any():
            place = np.argwhere(by_others)[0].tolist()
            raise AssertionError(f"{where} {name}{place} is not written by a Triton kernel")
    return Run(results, tuple(watch.launches), reads, writes, watch.widest)


def _explained(error: BaseException | None) -> str:
    """What the reader has to do about an error inside Triton; "" when it is not a known one."""
    while error:  # the innermost is the reason, and the interpreter has it in its own text
        if "but got fp16" in str(error) or "but got bf16" in str(error):
            return "Triton's exp and sigmoid take fp32: convert after the load, .to(tl.float32)"
        if "must be a power of 2" in str(error):
            return "the size of a block must be a power of two"
        if "arg 3 must not be zero" in str(error):
            return "a loop's step is 0: where there is nothing to do, launch nothing"
        error = error.__cause__
    return ""


def assert_values(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    allowed: torch.Tensor,
    x: torch.Tensor,
    where: str,
) -> None:
    """AssertionError at the first element whose error, against float64, is above `allowed`."""
    error = (actual.double() - expected).abs()
    wrong = ~(error <= allowed)
    if not wrong.any():
        return
    lost = wrong & ~actual.isfinite()  # of these the smallest says where they begin
    i = int(torch.where(lost, x.abs(), torch.inf).argmin() if lost.any() else wrong.nonzero()[0])
    hint = ": does an exponential overflow?" if lost.any() else ""
    raise AssertionError(
        f"{where} {name}[{i}] is {actual[i]:.6g} for x = {x[i]:g}, and should be "
        f"{expected[i]:.6g}{hint}"
    )


def assert_frugal(done: Run, where: str, reads: int = 1, why: str = "") -> None:
    """AssertionError unless one launch touched each element once (as far as can be seen).

    reads: how often an element may be read; why: what to say to a kernel that reads more often.
    """
    if (launches := len(done.launches)) != 1:
        names = ", ".join(launch.kernel.__name__ for launch in done.launches)
        raise AssertionError(
            f"{where} the values are right, but it launches {launches} kernels ({names}): one is "
            "enough"
        )
    for doing, counts, most, hint in (
        ("reads", done.reads, reads, why),
        ("writes", done.writes, 1, ""),
    ):
        for name, times in (counts or {}).items():
            if times.size and times.max() > most:
                place = np.argwhere(times > most)[0]
                raise AssertionError(
                    f"{where} the values are right, but it {doing} {name}{place.tolist()} "
                    f"{times[tuple(place)]} times: {('once', 'twice')[most - 1]} is enough{hint}"
                )


def assert_compiles(launches: Sequence[Launch]) -> None:
    """AssertionError when Triton's compiler refuses what its interpreter has run, or makes fp64.

    Nothing happens where kernels are compiled anyway, or where they cannot be.
    """
    if not interpreting():
        return
    try:
        compiled = ptx.triton_compile_many([_request(launch) for launch in launches])
    except (ptx.CompileError, ValueError) as error:
        raise AssertionError(f"the values are right, but Triton's compiler says: {error}") from None
    except (ptx.ToolMissing, OSError):  # OSError: Python does not find the kernel's source
        return
    if fp64 := max(ptx.fp64_instructions(each.ptx) for each in compiled):
        raise AssertionError(
            f"the values are right, but its PTX has {fp64} fp64 instructions: compute in fp32"
        )


def constants(launch: Launch) -> dict[str, object]:
    """The arguments that a launch compiles in: those declared tl.constexpr, and None and others."""
    parameters = inspect.signature(launch.kernel.fn).parameters
    return {
        name: value
        for name, value in launch.arguments.items()
        if "constexpr" in str(parameters[name].annotation)
        or not isinstance(value, (torch.Tensor, int, float))
    }


def _request(launch: Launch) -> ptx.Request:
    from triton.runtime.jit import mangle_type

    known = constants(launch)
    signature = {k: mangle_type(v) for k, v in launch.arguments.items() if k not in known}
    options = dict(launch.options)
    own = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    return ptx.Request(launch.kernel, signature, known, ARCH, **own, options=options)
