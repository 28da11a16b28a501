"""Keep what the backward pass needs, or compute it again: three sigmoids, and how to tell.

y = sigmoid(sigmoid(sigmoid(x))) is slide 31's example. Its functions take and give tensors of one
shape, and each can be compiled into a single kernel.
"""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

import helpers.profiling  # noqa: F401  before the first profile, which it keeps from printing
from helpers import compute_roofs
from helpers.device import has_cuda, synchronize
from helpers.eager_traffic import count
from helpers.traffic import Work


def forward_saving(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three results, of which the last is y: 1 read, 3 writes."""
    s1 = torch.sigmoid(x)
    s2 = torch.sigmoid(s1)
    return s1, s2, torch.sigmoid(s2)


def three_sigmoids(x: torch.Tensor) -> torch.Tensor:
    """y alone, which PyTorch differentiates: eagerly with a kernel an operation."""
    return torch.sigmoid(torch.sigmoid(torch.sigmoid(x)))


def backward_from_saved(
    s1: torch.Tensor, s2: torch.Tensor, s3: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient for x from the three results and the gradient for y: 4 reads, 1 write."""
    for s in (s3, s2, s1):
        grad = grad * s * (1 - s)  # a sigmoid's derivative, in terms of its result
    return grad


def forward_only(x: torch.Tensor) -> tuple[torch.Tensor]:
    """y alone: 1 read, 1 write."""
    return (three_sigmoids(x),)


def backward_recomputing(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient for x from x itself: 2 reads, 1 write."""
    return backward_from_saved(*forward_saving(x), grad)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to differentiate y: what the forward pass keeps, and the two passes.

    forward(x) gives a tuple that ends in y; backward(*kept, grad) gives x's gradient, where `kept`
    is that tuple, or x alone.
    """

    keeps_results: bool
    forward: Callable
    backward: Callable

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y, differentiable once."""
        return _ThreeSigmoids.apply(x, self)


class _ThreeSigmoids(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, way):
        results = way.forward(x)
        ctx.save_for_backward(*(results if way.keeps_results else (x,)))
        ctx.way = way
        return results[-1]

    @staticmethod
    @once_differentiable  # a second derivative would miss that s1 and s2 depend on x
    def backward(ctx, grad):
        return ctx.way.backward(*ctx.saved_tensors, grad), None


SAVE = Way(True, forward_saving, backward_from_saved)
RECOMPUTE = Way(False, forward_only, backward_recomputing)


def compiled_ways() -> tuple[Way, Way]:
    """`SAVE` and `RECOMPUTE` with every pass compiled into one kernel.

    On a CPU, where the C++ compiler takes five seconds a call, all passes are compiled as one
    function of four sets of tensors. It runs one pass by getting a few elements for the others.
    """
    ways = SAVE, RECOMPUTE
    passes = [run for way in ways for run in (way.forward, way.backward)]
    if has_cuda():
        passes = [compute_roofs.compiled(run) for run in passes]
    else:
        at_once = compute_roofs.compiled(_all_passes, dynamic=True)
        # Compiled for large tensors: for small ones it would leave passes to a single thread.
        with torch.no_grad():
            at_once(*_some_tensors(2**20))
        passes = [functools.partial(_one_pass, at_once, place) for place in range(4)]
    return tuple(
        dataclasses.replace(way, forward=passes[2 * i], backward=passes[2 * i + 1])
        for i, way in enumerate(ways)
    )


def _all_passes(x, results_and_grad, other_x, other_x_and_grad):
    return (
        forward_saving(*x),
        backward_from_saved(*results_and_grad),
        forward_only(*other_x),
        backward_recomputing(*other_x_and_grad),
    )


def _one_pass(at_once: Callable, place: int, *tensors: torch.Tensor):
    given = _some_tensors(16)
    given[place] = [tensor.detach() for tensor in tensors]
    with torch.no_grad():  # in one mode always, or it compiles for each
        return at_once(*given)[place]


def _some_tensors(n: int) -> list[list[torch.Tensor]]:
    """The arguments of `_all_passes`, of about n elements."""
    # Different tensors, of different sizes: the compiler would hold equal ones for the same.
    numbers = enumerate((1, 4, 1, 2))
    return [[torch.zeros(n + 16 * i) for _ in range(number)] for i, number in numbers]


def fused_work(function: Callable, *inputs: torch.Tensor) -> Work:
    """What `function(*inputs)` moves as one kernel: each input read once, each output written once.

    FLOPs are those of its operations. `inputs` are different tensors, all of which it uses.
    """
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    read, written = (sum(tensor.nbytes for tensor in group) for group in (inputs, outputs))
    return Work(read, written, count(lambda: function(*inputs)).flops)


def bytes_kept(run: Callable, besides: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of what `run()` computes.

    A tensor that is kept twice counts once. `besides`: tensors that are there anyway, such as a
    model's parameters, do not count. Counted is what goes through autograd's hooks: also what a
    graph kept that `run` drops, and nothing that a Function hides on its ctx.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor.detach()  # held, so that its place is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result  # only now: with the graph its tensors would have gone
    return total


def peak_bytes(run: Callable) -> int:
    """The most memory that `run()` holds at once, on top of what was there before.

    It is called once before, to compile and to warm up. On a GPU PyTorch's allocator has the
    number; on a CPU it is the running sum of what the profiler saw allocated and freed.
    """
    run()
    synchronize()
    if has_cuda():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
