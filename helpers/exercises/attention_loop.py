"""The checker of exercise 11.1: the inner loop of FlashAttention-2 by hand, tile after tile."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from helpers.exercises import attention_slips
from helpers.exercises.answers import Results, assert_small_tensors
from helpers.exercises.attention_slips import TOLERANCE, Seen, State

HEAD_DIM = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """Queries (Sq, d), keys and values (Sk, d), which keys each query sees, keys in a tile."""

    what: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor
    tile: int

    def __str__(self) -> str:
        sizes = f"Sq = {len(self.q)}, Sk = {len(self.k)} and tiles of {self.tile}"
        return f"for {sizes}{', ' if self.what else ''}{self.what}"

    def tiles(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Copies of k, v and visible, tile by tile; the last one may have fewer keys."""
        parts = self.k.split(self.tile), self.v.split(self.tile), self.visible.split(self.tile, 1)
        return [tuple(each.clone() for each in tile) for tile in zip(*parts, strict=True)]

    def expected(self, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ln(sum of exp(score)) and attention over the keys of the first tiles; 0 without any."""
        keys = slice(num_tiles * self.tile)
        scores = self.q @ self.k[keys].T / math.sqrt(self.q.shape[1])
        scores = scores.masked_fill(~self.visible[:, keys], -math.inf)
        weights = scores.softmax(1).where(self.visible[:, keys].any(1, keepdim=True), 0)
        return scores.logsumexp(1), weights @ self.v[keys]


def attention_steps(answer: Callable) -> None:
    """AssertionError unless answer(q, tiles) yields the right (m, l, o) after each tile.

    q: (Sq, d) in float64. tiles: an iterator of (k, v, visible), of shapes (T, d), (T, d) and
    (Sq, T): keys, values, and True where a query sees a key. Scores are q·k / sqrt(d). Over the
    keys that each query has seen so far, m (Sq,) is the largest score, -inf without any; l (Sq,)
    the sum of exp(score - m); o (Sq, d) the sum of exp(score - m) v. Another m is as good where l
    and o belong to it. Nothing is kept of a tile: its memory is overwritten when the next is taken.
    """
    for case in _cases():
        states = []
        for state in _states(answer, case):
            states.append(state)
            if why := _wrong(states, case):
                raise AssertionError(f"{case}, after tile {len(states)}: {why}")
    _assert_frugal(answer)


def _cases() -> Iterator[Case]:
    """The easiest first."""
    generator = torch.Generator().manual_seed(0)

    def case(sq, sk, tile, what="", visible=None, also: float | torch.Tensor = 0.0, d=HEAD_DIM):
        """also: is added to the score of each key."""
        q, k, v = (
            torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (sq, sk, sk)
        )
        q[:, 0], k[:, 0] = math.sqrt(d), k[:, 0] + also
        everything = torch.ones(sq, sk, dtype=torch.bool)
        return Case(what, q, k, v, everything if visible is None else visible, tile)

    def ramp(start, stop, n=24):
        return torch.linspace(start, stop, n, dtype=torch.float64)

    yield case(3, 6, 2)  # no root of these is that of HEAD_DIM, so a wrong scale is wrong here
    yield case(5, 24, 6, "rising scores", also=ramp(0, 20))
    yield case(5, 24, 6, "falling scores", also=ramp(20, 0))
    for sizes in ((3, 5, 64), (1, 1, 1), (1, 17, 16), (16, 15, 1), (15, 16, 16), (65, 17, 16)):
        yield case(*sizes)
    yield case(17, 65, 16)
    yield case(2, 127, 32)
    yield case(127, 1, 3)
    for sq, sk in ((6, 6), (5, 17), (17, 5)):
        yield case(sq, sk, 2, "causal", torch.ones(sq, sk, dtype=torch.bool).tril())
    window = torch.ones(16, 16, dtype=torch.bool).tril().triu(-2)
    yield case(16, 16, 4, "a causal window of 3 keys", window)
    some = torch.rand(16, 33, generator=generator) < 0.3
    some[::5], some[:, 8:16] = False, False
    yield case(16, 33, 8, "some rows and one tile all hidden", some)
    yield case(3, 5, 2, "everything hidden", torch.zeros(3, 5, dtype=torch.bool))
    yield case(5, 24, 6, "scores that rise to 1000", also=ramp(-1000, 1000))
    yield case(5, 24, 6, "scores that fall to -1000", also=ramp(1000, -1000))
    yield case(5, 24, 6, "scores near -1000", also=-1000.0)
    odd = torch.arange(24) % 2 == 1
    high_hidden = torch.where(odd, -1000.0, 1000.0).double()
    yield case(5, 24, 6, "large scores hidden", odd.expand(5, 24), high_hidden)
    yield case(3, 6, 2, "d = 7", d=7)  # where the root of d is not its half


def _states(answer: Callable, case: Case) -> Iterator[State]:
    """Copies of what `answer` yields: one (m, l, o) after each tile, and the inputs as before."""
    q, tiles, taken, yielded = case.q.clone(), case.tiles(), 0, 0

    def stream() -> Iterator[tuple[torch.Tensor, ...]]:
        nonlocal taken
        for k, v, visible in case.tiles():
            if yielded < taken:
                hidden = not tiles[taken - 1][2].any()
                raise AssertionError(
                    f"{case}, it takes tile {taken + 1} before it has yielded the state after "
                    f"tile {taken}: one `yield` a turn of the loop"
                    f"{', also where a tile is hidden from all' if hidden else ''}"
                )
            taken += 1
            inputs[1:] = k, v, visible
            yield k, v, visible
            k.fill_(math.nan)
            v.fill_(math.nan)

    inputs = [q]
    given = answer(q, stream())
    if not isinstance(given, Iterator):
        kind = type(given).__name__
        raise AssertionError(f"it returns {kind}: with `yield` in its loop it is a generator")
    for state in given:
        yielded += 1
        where = f"{case}, after tile {taken}: "
        if yielded != taken:
            raise AssertionError(f"{where}it yields state {yielded}: one `yield` after each tile")
        before = (case.q, *tiles[taken - 1])
        for name, old, new in zip(("q", "k", "v", "visible"), before, inputs, strict=True):
            if not torch.equal(old, new):
                raise AssertionError(f"{where}it changes {name} in place: make a new tensor")
        yield _copied(state, case, where)
    if yielded < len(tiles):
        raise AssertionError(f"{case}, it yields {yielded} of {len(tiles)} states: one a tile")


def _copied(state: object, case: Case, where: str) -> State:
    """(m, l, o) of the shapes (Sq,), (Sq,), (Sq, d); a last dimension of 1 is dropped."""
    if not isinstance(state, tuple | list) or len(state) != 3:
        raise AssertionError(f"{where}yield three tensors, m, l and o, not {type(state).__name__}")
    rows, copies = len(case.q), []
    for name, each in zip("mlo", state, strict=True):
        shapes = [tuple(case.q.shape)] if name == "o" else [(rows,), (rows, 1)]
        if not isinstance(each, torch.Tensor):
            raise AssertionError(f"{where}{name} has to be a tensor, not {type(each).__name__}")
        if tuple(each.shape) not in shapes:
            raise AssertionError(
                f"{where}{name} has the shape {tuple(each.shape)}, not {shapes[0]}: "
                f"{'a row' if name == 'o' else 'one number'} for each query"
            )
        if each.dtype != case.q.dtype:
            raise AssertionError(f"{where}{name} is {each.dtype}, and q torch.float64: keep q's")
        copies.append(each.detach().clone().reshape(shapes[0]))
    return tuple(copies)


def _wrong(states: Sequence[State], case: Case) -> str:
    """What is wrong with the last of these states, one a tile; "" if nothing is."""
    (log_sum, result), expected = attention_slips.shown(states[-1]), case.expected(len(states))
    right = [
        torch.isclose(given, correct, rtol=TOLERANCE, atol=TOLERANCE)
        for given, correct in zip((log_sum, result), expected, strict=True)
    ]
    rows = ~(right[0] & right[1].all(1))
    if not rows.any():
        return ""
    row = int(rows.nonzero()[0])
    empty = expected[0][row] == -math.inf
    _, sums, outputs = states[-1]
    if empty:
        said = (
            f"row {row} has seen no key, so its l and o are 0, not {sums[row]:.6g} and "
            f"[{', '.join(f'{each:.3g}' for each in outputs[row])}]"
        )
    elif right[1][row].all():
        said = (
            f"o / l is right, but in row {row} m + ln(l), the logarithm of the sum of exp(score), "
            f"is {log_sum[row]:.8g}, not {expected[0][row]:.8g}"
        )
    else:
        column = int((~right[1][row]).nonzero()[0])
        said = (
            f"o / l of row {row}, column {column} is {result[row, column]:.8g}; attention over the "
            f"keys so far is {expected[1][row, column]:.8g}"
        )
    seen = [
        Seen(case.q @ k.T / math.sqrt(case.q.shape[1]), visible, v, case.q.shape[1])
        for k, v, visible in case.tiles()[: len(states)]
    ]
    why = attention_slips.why(states, seen, *expected)
    return f"{said}{': ' if why else ''}{why}"


def _assert_frugal(answer: Callable) -> None:
    """AssertionError where the largest tensor, or how many are kept, grows with the tiles."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, HEAD_DIM, generator=generator, dtype=torch.float64) for n in (3, 768, 768)
    )
    case = Case("", q, k, v, torch.ones(3, 768, dtype=torch.bool), 12)
    # The products q·k of a tile that is padded to 64 keys, before they are added up; twice that.
    plenty = 2 * q.numel() * 64
    why = "what is kept from tile to tile, m, l and o, does not grow"
    alive = []

    def run(results: Results) -> None:
        alive.extend(results.alive() for _ in _states(answer, case))

    assert_small_tensors(run, str(case), plenty, why)
    if (kept := alive[-1] - alive[len(alive) // 2]) > len(alive) // 4:
        raise AssertionError(
            f"the values are right, but after {len(alive)} tiles it has {kept} tensors more than "
            f"after {len(alive) // 2 + 1}: {why}"
        )
