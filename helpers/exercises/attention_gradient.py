"""The checker of exercise 12.1: the gradients of attention by hand, tile after tile."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck

from helpers.exercises import attention_gradient_slips as slips
from helpers.exercises import attention_loop
from helpers.exercises.answers import Results, assert_small_tensors
from helpers.exercises.attention_slips import TOLERANCE

NAMES = ("dq", "dk", "dv")
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case(attention_loop.Case):
    """A case of the forward loop, and the gradient (Sq, d) for its result."""

    do: torch.Tensor

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o, and the log-sum-exp of each row as our kernels keep it: inf for one without keys."""
        log_sum, o = self.expected(len(self.k))
        return o, log_sum.where(log_sum > -math.inf, math.inf)

    def gradients(self) -> Gradients:
        """What autograd makes of the formula."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        _, o = dataclasses.replace(self, q=q, k=k, v=v).expected(len(k))
        return torch.autograd.grad(o, leaves, self.do)


def attention_gradients(answer: Callable) -> None:
    """AssertionError unless answer(q, o, log_sum_exp, do, tiles) is (dq, dk, dv).

    q, o and do: (Sq, d) in float64, o being the attention of q over all tiles and do the gradient
    for it. log_sum_exp: (Sq,), ln of the sum of exp(score) over the keys that a query sees, inf
    where it sees none. tiles: an iterator of (k, v, visible) as in exercise 11.1. dq: (Sq, d); dk
    and dv: (Sk, d), of all tiles. Nothing is kept of a tile: its memory is overwritten when the
    next is taken. No tensor is of the size of P over all tiles.
    """
    for case in _cases():
        given = _answered(answer, case)
        if why := _wrong(given, case):
            raise AssertionError(f"{case}, {why}")
    _assert_frugal(answer)
    _assert_gradcheck(answer, case)


def _cases() -> Iterator[Case]:
    """The easiest first; the last one is small and has everything but large scores."""
    generator = torch.Generator().manual_seed(0)

    def case(sq, sk, tile, what="", visible=None, also: float | torch.Tensor = 0.0, d=4, part=1):
        """also: is added to the score of each key; `part` times that to the key itself."""
        q, k, v, do = (
            torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (sq, sk, sk, sq)
        )
        q[:, 0], k[:, 0] = math.sqrt(d) / part, (k[:, 0] + also) * part
        everything = torch.ones(sq, sk, dtype=torch.bool)
        return Case(what, q, k, v, everything if visible is None else visible, tile, do)

    yield case(3, 6, 3, d=3)  # all is square, so what is transposed wrongly is named, not refused
    for sizes in ((3, 5, 2), (2, 5, 64), (1, 1, 1), (17, 5, 4), (4, 17, 1)):
        yield case(*sizes)
    for sq, sk in ((6, 6), (5, 17), (17, 5)):
        yield case(sq, sk, 4, "causal", torch.ones(sq, sk, dtype=torch.bool).tril())
    some = torch.rand(16, 33, generator=generator) < 0.3
    some[::5], some[:, 8:16] = False, False
    yield case(16, 33, 8, "some rows and one tile all hidden", some)
    yield case(3, 5, 2, "everything hidden", torch.zeros(3, 5, dtype=torch.bool))
    rising = torch.linspace(-1000, 1000, 24, dtype=torch.float64)
    yield case(5, 24, 6, "scores that rise to 1000", also=rising)
    yield case(5, 24, 6, "scores near -1000", also=-1000.0)
    odd = torch.arange(24) % 2 == 1
    high_hidden = torch.where(odd, -1000.0, 1000.0).double()
    yield case(5, 24, 6, "large scores hidden", odd.expand(5, 24), high_hidden)
    low = "scores near -20000, half of them hidden"
    yield case(5, 24, 6, low, odd.expand(5, 24), -20000.0, part=0.002)  # so dq stays small
    last = torch.ones(4, 5, dtype=torch.bool).tril(1)
    last[2] = False
    yield case(4, 5, 2, "a row hidden", last, d=2)


def _answered(answer: Callable, case: Case) -> Gradients:
    """What `answer` returns, of the right kind, and its inputs as before."""
    q, (o, log_sum_exp), do = case.q.clone(), case.kept(), case.do.clone()

    def unchanged(*pairs: tuple[str, torch.Tensor, torch.Tensor]) -> None:
        for name, before, after in pairs:
            if not torch.equal(before, after):
                raise AssertionError(f"{case}, it changes {name} in place: make a new tensor")

    def stream() -> Iterator[tuple[torch.Tensor, ...]]:
        for before, tile in zip(case.tiles(), case.tiles(), strict=True):
            yield tile
            unchanged(*zip(("k", "v", "visible"), before, tile, strict=True))
            for each in tile[:2]:
                each.fill_(math.nan)

    given = answer(q, o, log_sum_exp, do, stream())
    kept = zip(("o", "log_sum_exp"), case.kept(), (o, log_sum_exp), strict=True)
    unchanged(("q", case.q, q), *kept, ("do", case.do, do))
    if not isinstance(given, tuple | list) or len(given) != 3:
        kind = type(given).__name__
        raise AssertionError(f"{case}, return three tensors, dq, dk and dv, not {kind}")
    for name, each, like in zip(NAMES, given, (case.q, case.k, case.v), strict=True):
        if not isinstance(each, torch.Tensor):
            kind = type(each).__name__
            raise AssertionError(
                f"{case}, {name} has to be a tensor, not {kind}: torch.cat makes one of a list"
            )
        if each.shape != like.shape:
            sizes = f"{tuple(each.shape)}, not {tuple(like.shape)}"
            raise AssertionError(
                f"{case}, {name} has the shape {sizes}: a row for each "
                f"{'query' if name == 'dq' else 'key of every tile'}"
            )
        if each.dtype != like.dtype:
            raise AssertionError(
                f"{case}, {name} is {each.dtype}, and q torch.float64: keep q's dtype"
            )
    return tuple(given)


def _wrong(given: Gradients, case: Case) -> str:
    """What is wrong with the gradients; "" if nothing is."""
    expected = case.gradients()
    for name in ("dv", "dk", "dq"):  # P first, then dS, then the sum over tiles
        place = NAMES.index(name)
        found, right = given[place], expected[place]
        close = torch.isclose(found, right, rtol=TOLERANCE, atol=TOLERANCE)
        if close.all():
            continue
        row, column = (int(each) for each in (~close).nonzero()[0])
        why = slips.why(name, found, right, case, *case.kept())
        return (
            f"{name}[{row}, {column}] is {found[row, column]:.6g}, not {right[row, column]:.6g}"
            f"{': ' if why else ''}{why}"
        )
    return ""


def _assert_frugal(answer: Callable) -> None:
    """AssertionError where it makes a tensor of the size of P over all tiles."""
    generator = torch.Generator().manual_seed(1)
    q, do, k, v = (
        torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (16, 16, 32, 32)
    )
    case = Case("", q, k, v, torch.ones(16, 32, dtype=torch.bool), 4, do)
    kept, tiles = case.kept(), iter(case.tiles())

    def run(results: Results) -> None:
        answer(q, *kept, do, tiles)

    why = "P and dS are of one tile, and never of all keys"
    plenty = case.visible.numel() // 2  # dk and dv together, or what each tile adds to dq
    assert_small_tensors(run, str(case), plenty, why)


class _Attention(torch.autograd.Function):
    """The formula forward, and the answer backward."""

    @staticmethod
    def forward(ctx, q, k, v, case, answer):
        ctx.case, ctx.answer = dataclasses.replace(case, q=q, k=k, v=v), answer
        return ctx.case.expected(len(k))[1]

    @staticmethod
    def backward(ctx, do):
        return *_answered(ctx.answer, dataclasses.replace(ctx.case, do=do)), None, None


def _assert_gradcheck(answer: Callable, case: Case) -> None:
    """AssertionError unless finite differences give the same, and a second call the same bits."""
    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def attention(*inputs):
        return _Attention.apply(*inputs, case, answer)

    try:
        gradcheck(attention, inputs, check_undefined_grad=False)
    except GradcheckError as error:
        said = str(error).split(",")[0].split("\n")[0]
        raise AssertionError(
            f"{case}, autograd's values come out, but torch.autograd.gradcheck says: {said}"
        ) from None
