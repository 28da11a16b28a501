"""The checker of exercise 04.1: the traffic of a program of pointwise operations."""

import functools
import operator
import random
from collections import defaultdict
from collections.abc import Callable

from helpers import eager_traffic  # first: it sets Triton's mode

# isort: split
import torch

from helpers.exercises.answers import is_number, plain

# Name -> the function, and what it takes: t is a tensor, s a scalar.
OPERATIONS = {
    "exp": (torch.exp, ("t",)),
    "sigmoid": (torch.sigmoid, ("t",)),
    "neg": (torch.neg, ("t",)),
    "add": (operator.add, ("tt", "ts", "st")),
    "sub": (operator.sub, ("tt", "ts", "st")),
    "mul": (operator.mul, ("tt", "ts", "st")),
    "pow": (operator.pow, ("tt", "ts", "st")),
    "maximum": (torch.maximum, ("tt",)),
    "clamp": (torch.clamp, ("tss",)),
    "lerp": (torch.lerp, ("ttt", "tts")),
    "addcmul": (torch.addcmul, ("ttt",)),
}
INPUTS = ("x", "gate", "bias")
RESULTS = ("a", "b", "c", "h1", "h2", "scale", "u", "y")
SCALARS = (2, 0.5, 3, -1.0)
SIZES = (1000, 33, 1, 4096)
PROGRAMS = 200

Operation = tuple[str | int | float, ...]  # ("y", "add", "x", 1.0) is y = x + 1.0
Case = tuple[tuple[Operation, ...], tuple[str, ...], int]  # program, outputs, elements of a tensor


def traffic(answer: Callable) -> None:
    """AssertionError unless answer(program, outputs, n) is (unfused bytes, fused bytes).

    What the operations move one by one is counted while PyTorch runs them.
    """
    for program, outputs, n in cases():
        given = plain(answer(list(program), list(outputs), n))
        text = "; ".join(f"{r} = {name}({', '.join(map(str, a))})" for r, name, *a in program)
        where = f"for [{text}] with outputs {', '.join(outputs)} and n = {n}"
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise AssertionError(f"{where} return a pair, unfused and fused bytes, not {given!r}")
        read = {a for _, _, *arguments in program for a in arguments if isinstance(a, str)}
        inputs = sorted(read - {result for result, *_ in program})
        fused_bytes = 4 * n * (len(inputs) + len(outputs))
        alone = "; ".join(_moves(name, tensors(a), [result]) for result, name, *a in program)
        for kind, value, expected_bytes, why in (
            ("unfused", plain(given[0]), unfused_bytes(program, n), alone),
            ("fused", plain(given[1]), fused_bytes, _moves("the kernel", inputs, outputs)),
        ):
            if not is_number(value):
                raise AssertionError(f"{where} {kind} needs a number of bytes, not {value!r}")
            if value != expected_bytes:
                if value * 4 == expected_bytes:
                    why = "an fp32 element takes 4 bytes"
                raise AssertionError(
                    f"{where}, {kind}, it moves {expected_bytes:,} bytes, "
                    f"{expected_bytes // (4 * n)} tensors, not {value:,}: {why}"
                )


def _moves(who: str, read: list[str], written: list[str]) -> str:
    return f"{who} reads {', '.join(read)} and writes {', '.join(written)}"


def tensors(arguments: list) -> list[str]:
    """The names among an operation's arguments, each once."""
    return list(dict.fromkeys(a for a in arguments if isinstance(a, str)))


@functools.cache
def unfused_bytes(program: tuple[Operation, ...], n: int) -> float:
    """Bytes of the operations one by one, as `eager_traffic` counts them."""

    def run():
        values = defaultdict(lambda: torch.empty(n))
        for result, name, *arguments in program:
            given = [values[a] if isinstance(a, str) else a for a in arguments]
            values[result] = OPERATIONS[name][0](*given)

    return eager_traffic.count(run).bytes


@functools.cache
def cases() -> tuple[Case, ...]:
    """Random programs, the smallest first: the first that fails is the hint."""
    rng = random.Random(0)
    made = [_case(rng) for _ in range(PROGRAMS)]
    return tuple(sorted(made, key=lambda case: (len(case[0]), sum(map(len, case[0])), case[1:])))


def _case(rng: random.Random) -> Case:
    """A program whose every result is used later or an output; no name stands for two values."""
    known = rng.sample(INPUTS, rng.randint(1, 3))
    program, unused = [], []
    for result in rng.sample(RESULTS, rng.choice((1, 2, 2, 3, 4, 6, 8))):
        name, (_, kinds) = rng.choice(list(OPERATIONS.items()))
        arguments = []
        for kind in rng.choice(kinds):
            if kind == "s":
                arguments.append(rng.choice(SCALARS))
            elif (before := tensors(arguments)) and rng.random() < 0.3:
                arguments.append(before[-1])
            else:
                arguments.append(rng.choice(unused if unused and rng.random() < 0.5 else known))
        program.append((result, name, *arguments))
        known.append(result)
        unused = [a for a in unused if a not in arguments] + [result]
    used = [result for result, *_ in program if result not in unused]
    outputs = unused + [result for result in used if rng.random() < 0.25]
    return tuple(program), tuple(rng.sample(outputs, len(outputs))), rng.choice(SIZES)
