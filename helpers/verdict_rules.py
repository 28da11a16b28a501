"""What a lecture states, what is found here, and how close the two must be.

A `Quantity` is a number that any machine's records give, so that the lecture's and ours come from
one formula; a `Statement` is one number of the lectures with ours beside it.

What is compared is what travels between machines. A time is compared as a ratio within its machine
or as a share of its memory's rate, with the times themselves beside it. It is compared as it is
where the SMs decide it: an H100 and an H200 have the same ones at the same clock (data/gpus.csv).
"""

import dataclasses
import math
from collections.abc import Callable

from helpers import specs
from helpers.machines import Machine
from helpers.traffic import Work

REPRODUCED, DIFFERS = "reproduced", "differs"
UNMEASURED, MISSING = "cannot be measured here", "not recorded"
# How far off, as a share of the stated number, still counts as the same.
MEASURED, ROUNDED, EXACT = 0.15, 0.05, 1e-9
Value = float | str | None


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number, or a name, of a machine; None where it lacks the records.

    `parts` are what it was computed from: the text shows them in brackets.
    """

    of: Callable[[Machine], Value]
    unit: str = ""
    parts: tuple["Quantity", ...] = ()

    def __call__(self, machine: Machine) -> Value:
        return self.of(machine)

    def shown_parts(self, machine: Machine) -> str:
        """Like " (7,670 / 702 µs)"; empty without parts."""
        values = [part(machine) for part in self.parts]
        if not values or None in values:
            return ""
        three = (number(float(f"{value:.3g}")) for value in values)
        return f" ({' / '.join(three)} {self.parts[0].unit})"


@dataclasses.dataclass(frozen=True)
class Statement:
    """One number that the lectures state in a row of the lecture map.

    stated: the number as the row's claim has it, or a quantity of the lecture's records.
    found: ours, None where nothing here could give it. `by`: what gave it; empty: a machine's
    records. bound: "at least", "at most" or "over" where the lecture states a limit.
    because: why it cannot be measured, or what explains a difference if there is one.
    """

    row: str
    what: str
    stated: float | str | Quantity
    found: Quantity | None
    unit: str = ""
    by: str = ""
    within: float = MEASURED
    bound: str = ""
    because: str = ""


@dataclasses.dataclass(frozen=True)
class Judged:
    """A statement held against the records of two machines: the lecture's and ours."""

    statement: Statement
    stated: Value
    found: Value
    verdict: str
    by: str
    parts: tuple[str, str] = ("", "")  # of the stated and of the found number

    @property
    def because(self) -> str:
        return self.statement.because if self.verdict in (DIFFERS, UNMEASURED) else ""

    @property
    def distance(self) -> float:
        """How far apart the numbers are, as a share of the stated one; 0 for names and limits."""
        if self.statement.bound or not isinstance(self.found, (int, float)):
            return 0.0
        return abs(self.found / self.stated - 1)

    def said(self, parts: bool = True) -> str:
        """What is stated and what was found, without the verdict and its reason."""
        unit = self.statement.unit
        unit = unit if unit in ("%", "×", "") else f" {unit}"
        of_stated, of_found = self.parts if parts else ("", "")
        named = f"{self.statement.what} {self.statement.bound}".strip()
        text = f"{named} {number(self.stated)}{unit}{of_stated}"
        if self.verdict in (REPRODUCED, DIFFERS):
            same = isinstance(self.found, str) and self.found == self.stated
            found = "the same" if same else number(self.found, like=self.stated)
            text += f", {self.by} {found}{of_found}"
        return text


def record(claims: str, op: str, unit: str, **rest: str) -> Quantity:
    """A record, under the first of these rows of the map that has it; `rest` as `Machine.value`."""

    def of(machine: Machine) -> float | None:
        values = (machine.value(claim, op, **rest) for claim in claims.split())
        return next((value for value in values if value is not None), None)

    return Quantity(of, {"us": "µs"}.get(unit, unit))


def first(*quantities: Quantity) -> Quantity:
    """The first that a machine has."""

    def of(machine: Machine) -> float | None:
        values = (quantity(machine) for quantity in quantities)
        return next((value for value in values if value is not None), None)

    return Quantity(of, quantities[0].unit)


def over(a: Quantity, b: Quantity) -> Quantity:
    """a / b, both shown."""

    def of(machine: Machine) -> float | None:
        above, below = a(machine), b(machine)
        return above / below if above is not None and below else None

    return Quantity(of, parts=(a, b))


def scaled(a: Quantity, factor: float) -> Quantity:
    """In another unit."""

    def of(machine: Machine) -> float | None:
        value = a(machine)
        return None if value is None else value * factor

    return Quantity(of)


def share_of_memory(kernel_us: Quantity, work: Work) -> Quantity:
    """The rate of a kernel's bytes, in per cent of the datasheet's; the time is shown."""

    def of(machine: Machine) -> float | None:
        us, gpu = kernel_us(machine), specs.find(machine.device)
        return 100 * work.bytes / us / 1e3 / gpu.memory_gb_per_s if us and gpu else None

    return Quantity(of, parts=(kernel_us,))


def computed(function: Callable[[], Value]) -> Quantity:
    """The same on every machine: a count, a model, a datasheet."""
    return Quantity(lambda machine: function())


def series(notebook: str, name: str, function: Callable) -> Quantity:
    """What `function` makes of a recorded curve."""

    def of(machine: Machine) -> Value:
        frame = machine.series(notebook, name)
        return None if frame is None else function(frame)

    return Quantity(of)


def travels(row: str, what: str, quantity: Quantity, **rest) -> Statement:
    """The lecture's records and ours give the same quantity."""
    return Statement(row, what, quantity, quantity, **{"unit": quantity.unit, **rest})


def counted(row: str, what: str, stated, function: Callable[[], Value], **rest) -> Statement:
    """A model of this collection, or a datasheet, gives the number."""
    return Statement(
        row, what, stated, computed(function), **{"by": "counted", "within": EXACT, **rest}
    )


def unmeasured(row: str, what: str, stated: float, unit: str, because: str) -> Statement:
    """Nothing here could give the number."""
    return Statement(row, what, stated, None, unit, because=because)


def judge(statement: Statement, lecture: Machine, recorded: Machine) -> Judged:
    """Compare; a number that one of the machines lacks is "not recorded"."""
    stated, found, parts = statement.stated, None, ("", "")
    if isinstance(stated, Quantity):
        stated, parts = stated(lecture), (stated.shown_parts(lecture), "")
    if statement.found:
        found, parts = statement.found(recorded), (parts[0], statement.found.shown_parts(recorded))
    if statement.found is None:
        verdict = UNMEASURED
    elif stated is None or found is None:
        verdict = MISSING
    else:
        verdict = REPRODUCED if _agree(statement, stated, found) else DIFFERS
    by = statement.by or recorded.device.removeprefix("NVIDIA ") or "here"
    return Judged(statement, stated, found, verdict, by, parts)


def number(value: Value, like: Value = None) -> str:
    """For a reader: three digits, or four where it, or rather the one it is like, has four."""
    if not isinstance(value, (int, float)):
        return value or "?"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    model = like if isinstance(like, (int, float)) else value
    digits = 4 if float(f"{model:.4g}") == model != float(f"{model:.3g}") else 3
    # A computed 10.0 keeps its zero, a stated 7.3 gets none.
    exact = float(f"{value:.{digits}g}") == value
    return f"{value:.{digits}g}" if exact else f"{value:#.{digits}g}".rstrip(".")


def _agree(statement: Statement, stated: Value, found: Value) -> bool:
    if isinstance(stated, str) or isinstance(found, str):
        return stated == found
    if statement.bound == "at least":
        return found >= stated * (1 - statement.within)
    if statement.bound == "at most":
        return found <= stated * (1 + statement.within)
    if statement.bound == "over":
        return found > stated * (1 + statement.within)
    return math.isclose(found, stated, rel_tol=0, abs_tol=abs(stated) * statement.within)
