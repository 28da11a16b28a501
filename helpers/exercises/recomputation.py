"""The checker of exercise 04.2: three sigmoids that keep one tensor for the backward pass."""

import gc
import itertools
import math
from collections.abc import Callable, Iterator

import helpers.device  # noqa: F401  sets Triton's mode before a dispatch mode loads Triton

# isort: split
import numpy as np
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.check import assert_close, relative_error

LARGE = 2**16  # elements; beside them a generator's state, which checkpoint keeps, is small
# Room for any order of operations; `_assert_accurate` is stricter, element by element.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def three_sigmoids(answer: Callable) -> None:
    """AssertionError unless `answer` is sigmoid(sigmoid(sigmoid(x))) that keeps one tensor.

    answer: a subclass of torch.autograd.Function, or a function of x. What it keeps for the
    backward pass may be any one tensor of x's size that gives accurate gradients.
    """
    is_class = isinstance(answer, type) and issubclass(answer, torch.autograd.Function)
    function = answer.apply if is_class else answer
    for where, x, grad in _inputs():
        y = _forward(function, x, where)
        _assert_gradient(_backward(x, y, grad), x, grad, where)
    _assert_frugal(function)
    _assert_accurate(function)
    _assert_independent(function)
    x = torch.linspace(-4, 4, 6, dtype=torch.float64, requires_grad=True)
    try:
        torch.autograd.gradcheck(function, (x,), check_undefined_grad=False)
    except GradcheckError as error:
        raise AssertionError(f"gradcheck says: {str(error).splitlines()[0]}") from None


def _inputs() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What it is, x and the gradient of y."""
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape, dtype=torch.float32):
        return 3 * torch.randn(shape, generator=generator, dtype=dtype)

    for shape in ((5,), (33, 65), (1,), (), (0,), (2, 0, 3)):
        for dtype in (torch.float32, torch.float64):
            where = f"for x of shape {shape} in {str(dtype).removeprefix('torch.')}"
            yield where, numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype)
    yield "for a transposed x", numbers(7, 5).t(), numbers(5, 7)
    yield "for every other column of x", numbers(6, 10)[:, ::2], numbers(6, 5)
    yield "for a transposed gradient", numbers(7, 5), numbers(5, 7).t()
    yield "for the gradient of a sum, which is expanded", numbers(7, 5), torch.ones(()).expand(7, 5)


def _sigmoids(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s1 = torch.sigmoid(x.detach().double())
    s2 = torch.sigmoid(s1)
    return s1, s2, torch.sigmoid(s2)


def _forward(function: Callable, x: torch.Tensor, where: str) -> torch.Tensor:
    before = x.clone()
    y = function(x.requires_grad_())
    if not isinstance(y, torch.Tensor):
        raise AssertionError(f"return the tensor y, not {type(y).__name__}")
    if y.dtype != x.dtype:
        raise AssertionError(f"{where} y is of {y.dtype}, and x of {x.dtype}")
    try:
        assert_close(y, _sigmoids(x)[-1], TOLERANCE[x.dtype])
    except AssertionError as error:
        raise AssertionError(f"{where} y is wrong: {error}") from None
    if y.grad_fn is None:
        raise AssertionError("y has no grad_fn: no gradient will come back to x")
    if "Compiled" in y.grad_fn.name():
        raise AssertionError("leave torch.compile out: what is kept shall be your choice, not its")
    if not torch.equal(before, x):
        raise AssertionError(f"{where} x is changed, and it is not yours to change")
    return y


def _backward(x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, **options) -> torch.Tensor:
    x_before, grad_before, x.grad = x.detach().clone(), grad.clone(), None
    try:
        y.backward(grad, **options)
    except NotImplementedError:
        raise AssertionError("forward is right; backward is not written yet") from None
    if x.grad is None:
        raise AssertionError("no gradient comes back to x")
    for name, before, after in (("x", x_before, x), ("grad_output", grad_before, grad)):
        if not torch.equal(before, after):
            raise AssertionError(f"backward changes {name}, which others may use too")
    return x.grad


def _assert_gradient(found, x: torch.Tensor, grad: torch.Tensor, where: str) -> None:
    factors = {"grad_output": grad.double()}
    for name, s in zip(("s1", "s2", "s3"), _sigmoids(x), strict=True):
        factors[f"{name} (1 - {name})"] = s * (1 - s)
    tolerance = TOLERANCE[x.dtype]
    if relative_error(found, math.prod(factors.values())) <= tolerance:
        return
    for missing in itertools.chain(*(itertools.combinations(factors, k) for k in (1, 2, 3, 4))):
        left = torch.ones_like(x) * math.prod(factors[f] for f in factors if f not in missing)
        if relative_error(found, left) <= tolerance:
            raise AssertionError(f"the gradient lacks {' and '.join(missing)} as a factor")
    try:
        assert_close(found, math.prod(factors.values()), tolerance)
    except AssertionError as error:
        raise AssertionError(f"{where} the gradient is wrong: {error}") from None


def _assert_frugal(function: Callable) -> None:
    """One tensor of x's size lives between forward and backward, and none after them."""
    leaf = torch.randn(LARGE, requires_grad=True)
    with _Storages() as storages:
        x = leaf.clone()
        y = function(x)
    graph = torch.autograd.graph.get_gradient_edge(y)  # in torch 2.11 a node owns nothing
    attributes = _attributes(graph.node)
    del x, y
    if (kept := storages.alive(allowed=1.1)) > 1.1:
        raise AssertionError(
            f"it keeps {kept:.3g} tensors of x's size for backward: one is enough, the rest "
            "follows from it (plain sigmoids keep s1, s2 and s3)"
        )
    if kept < 0.9:
        raise AssertionError("what it keeps for backward is no tensor: use ctx.save_for_backward")
    if attributes:
        raise AssertionError(
            f"ctx.{attributes[0]} holds a tensor, whole or in parts: ctx.save_for_backward would "
            "notice if it was changed in between, and let it go after backward"
        )
    del graph
    if storages.alive(allowed=0):
        raise AssertionError("when y is gone, a tensor is still kept: something besides ctx has it")


class _Storages(TorchDispatchMode):
    """Every memory that an operation returns a tensor of, wherever that tensor is put then."""

    def __init__(self):
        super().__init__()
        self.nbytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.nbytes[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def alive(self, allowed: float) -> float:
        """How many tensors of LARGE fp32 elements; garbage first goes if there are too many."""
        for collect in (lambda: None, gc.collect):
            collect()
            alive = [n for storage, n in self.nbytes.items() if not storage.expired()]
            if (tensors := sum(alive) / (4 * LARGE)) <= allowed:
                break
        return tensors


def _attributes(node) -> list[str]:
    """The attributes, of a ctx in the graph below this node, that hold as much as x."""
    found, seen, waiting = [], set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name, value in getattr(node, "__dict__", {}).items():
            if sum(map(_size, tree_leaves(value))) >= LARGE:
                found.append(name)
        waiting += [below for below, _ in node.next_functions]
    return found


def _size(leaf: object) -> int:
    return leaf.numel() if isinstance(leaf, torch.Tensor) else np.size(leaf)


def _assert_accurate(function: Callable) -> None:
    """Each element's gradient in fp32, where sigmoids are flat."""
    x = torch.tensor([0, -4, -8, -12, -16, -20, -50, 2, 8, 20, 50, 1e3, -1e3, 3e38, -3e38])
    found = _backward(x, function(x.requires_grad_()), torch.ones_like(x)).double()
    expected = math.prod(s * (1 - s) for s in _sigmoids(x))
    # From above, 1 - s1 is as exact as fp32 next to 1 is.
    errors = (found - expected).abs() - 1e-3 * expected - torch.where(x > 0, 1e-8, 1e-30)
    if (bad := ~(errors <= 0)).any():
        i = int(bad.nonzero()[0])
        hint = "is s1 computed back from s2 or y, which hardly differ there"
        hint += ", or does an exponential overflow?"
        raise AssertionError(
            f"in fp32 the gradient at x = {x[i]:g} is {found[i]:.4g}, not {expected[i]:.4g}: {hint}"
        )


def _assert_independent(function: Callable) -> None:
    """Two graphs at once, in both orders, and one that is gone through twice."""
    for order in ((0, 1), (1, 0)):
        xs = [torch.linspace(-3, 3, 9), torch.linspace(0, 5, 9)]
        ys = [function(x.requires_grad_()) for x in xs]
        grad = torch.linspace(1, 2, 9)
        for place in (*order, *order):
            found = _backward(xs[place], ys[place], grad, retain_graph=True)
            where = "when two results wait for their backward, or one for its second,"
            _assert_gradient(found, xs[place], grad, where)
