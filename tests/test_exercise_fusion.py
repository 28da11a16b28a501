"""The checker of exercise 04.1 takes what is right, and says what is wrong."""

import re

import pytest
from verdicts import verdict

from helpers.exercises import fusion


def solution(program, outputs, n):  # the notebook's
    unfused, results, inputs = 0, set(), set()
    for result, _, *arguments in program:
        tensors = {a for a in arguments if isinstance(a, str)}
        unfused += len(tensors) + 1
        inputs |= tensors - results
        results.add(result)
    return 4 * n * unfused, 4 * n * (len(inputs) + len(outputs))


def by_running(program, outputs, n):
    """The unfused count as the checker has it; the fused one from names alone."""
    made = {result for result, *_ in program}
    named = {a for _, _, *arguments in program for a in arguments if type(a) is str}
    return fusion.unfused_bytes(tuple(program), n), 4.0 * n * (
        len(named - made) + len(set(outputs))
    )


def counted(reads, fused_tensors=None):
    """An answer with its own count of an operation's reads, or of the fused kernel's tensors."""

    def answer(program, outputs, n):
        unfused = sum(reads(arguments) + 1 for _, _, *arguments in program)
        return 4 * n * unfused, 4 * n * (fused_tensors or fused)(program, outputs)

    return answer


def names(arguments):
    return [a for a in arguments if isinstance(a, str)]


def distinct(arguments):
    return len(set(names(arguments)))


def results_of(program):
    return [result for result, *_ in program]


def reads_of(program):
    return [a for _, _, *arguments in program for a in names(arguments)]


def inputs_of(program):
    return set(reads_of(program)) - set(results_of(program))


def fused(program, outputs):
    return len(inputs_of(program)) + len(outputs)


def unused_results(program):
    return set(results_of(program)) - set(reads_of(program))


@pytest.mark.parametrize("answer", [solution, by_running, counted(distinct)])
def test_right_traffic(capsys, answer):
    assert verdict(capsys, "04.1", answer) == "correct."


# By hand: program, outputs, tensors moved unfused and fused.
BY_HAND = (
    ("y = exp x", "y", 2, 2),
    ("y = mul x x", "y", 2, 2),
    ("y = addcmul x x x", "y", 2, 2),
    ("y = clamp x -1.0 3", "y", 2, 2),
    ("a = mul x x; b = add a 1.0; y = mul a b", "y", 7, 2),
    ("a = mul x x; b = add a 1.0; y = mul a b", "y a", 7, 3),
    ("a = exp x; b = exp gate; y = lerp a b bias", "y", 8, 4),
    # The slide's sin^2 + cos^2 has this form, and this is GeLU by hand.
    ("a = exp x; b = neg x; c = pow a 2; u = pow b 2; y = add c u", "y", 11, 2),
    (
        "a = mul 0.5 x; b = mul 0.044715 x; c = mul b x; u = mul c x; h = add x u; "
        "v = mul 0.79788456 h; t = sigmoid v; s = add 1 t; y = mul a s",
        "y",
        22,
        2,
    ),
)


@pytest.mark.parametrize("text, outputs, unfused_tensors, fused_tensors", BY_HAND)
def test_the_reference_against_counts_by_hand(text, outputs, unfused_tensors, fused_tensors):
    program = []
    for line in text.split("; "):
        result, _, name, *arguments = line.split()
        arguments = [a if a[0].isalpha() else float(a) for a in arguments]
        program.append((result, name, *arguments))
    assert fusion.unfused_bytes(tuple(program), 100) == 400 * unfused_tensors
    assert solution(program, outputs.split(), 100)[1] == 400 * fused_tensors


def test_programs_are_sound():
    seen = set()
    for program, outputs, n in fusion.cases():
        results = results_of(program)
        assert len(set(results)) == len(results) and not inputs_of(program) & set(results)
        assert set(outputs) <= set(results) and len(set(outputs)) == len(outputs)
        assert unused_results(program) <= set(outputs) and n > 0
        known = inputs_of(program)
        for result, name, *arguments in program:
            assert set(names(arguments)) <= known
            known |= {result}
            seen.add(name)
    assert seen == set(fusion.OPERATIONS)
    sizes = [len(program) for program, _, _ in fusion.cases()]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 8


def in_elements(program, outputs, n):
    return tuple(value // 4 for value in solution(program, outputs, n))


WRONG_TRAFFIC = {
    # Unfused.
    "unary only": (counted(lambda a: 1), r"for \[\w+ = \w+\(\w+, \w+(, \w+)?\)\] .*unfused"),
    "scalars are tensors": (counted(lambda a: len(set(a))), "reads x and writes|reads"),
    "float scalars alone are left out": (
        counted(lambda a: len({v for v in a if not isinstance(v, float)})),
        r"[(, ][23][,)]",
    ),
    "scalars only last": (counted(lambda a: len(set(names(a[:1]) + a[1:]))), r"unfused"),
    "twice is two reads": (counted(lambda a: len(names(a))), r"(\w+), \1\)\].* reads \1 and"),
    "at most two": (counted(lambda a: min(2, distinct(a))), "unfused"),
    "names by their letters": (
        counted(lambda a: len(set("".join(names(a))))),
        r"unfused, it moves",
    ),
    "one-letter names": (
        counted(lambda a: sum(len(v) == 1 for v in set(names(a)))),
        "gate|bias|h1|h2",
    ),
    "reads alone": (
        lambda p, o, n: (4 * n * sum(distinct(a) for _, _, *a in p), solution(p, o, n)[1]),
        "unfused, it moves .* 2 tensors",
    ),
    "writes of outputs alone": (
        lambda p, o, n: (
            4 * n * (sum(distinct(a) for _, _, *a in p) + len(o)),
            solution(p, o, n)[1],
        ),
        r"\[[^;]*;[^;]*\] with .*unfused",
    ),
    "results are not read again": (
        lambda p, o, n: (
            4 * n * (sum(len(set(names(a)) & inputs_of(p)) for _, _, *a in p) + len(p)),
            solution(p, o, n)[1],
        ),
        r"unfused.*; ",
    ),
    "each tensor read once in all": (
        lambda p, o, n: (4 * n * (len(set(reads_of(p))) + len(p)), solution(p, o, n)[1]),
        r"unfused.*reads (\w+).*; .*reads (\w+, )*\1",
    ),
    "in elements": (in_elements, "an fp32 element takes 4 bytes"),
    "fp16": (lambda *c: tuple(v // 2 for v in solution(*c)), "unfused"),
    "one element": (lambda p, o, n: solution(p, o, 1), "unfused"),
    "n by heart": (lambda p, o, n: solution(p, o, 1000), "unfused"),
    # Fused.
    "fused like unfused": (lambda *c: (solution(*c)[0],) * 2, r"\[[^;]*;[^;]*\].* fused, it"),
    "exchanged": (lambda *c: solution(*c)[::-1], "unfused"),
    "an input once a use": (
        counted(distinct, lambda p, o: sum(a in inputs_of(p) for a in reads_of(p)) + len(o)),
        r"fused, it .*: the kernel reads (\w+)",
    ),
    "an input once an operation": (
        counted(distinct, lambda p, o: sum(len(set(a) & inputs_of(p)) for _, _, *a in p) + len(o)),
        r"\].* fused, it",
    ),
    "one input": (counted(distinct, lambda p, o: 1 + len(o)), r"the kernel reads \w+, \w+"),
    "the first operation's inputs": (
        counted(distinct, lambda p, o: distinct(p[0][2:]) + len(o)),
        "fused, it",
    ),
    "one output": (counted(distinct, lambda p, o: len(inputs_of(p)) + 1), r"writes \w+, \w+"),
    "outputs that are also read forgotten": (
        counted(distinct, lambda p, o: len(inputs_of(p)) + len(unused_results(p))),
        r"(\w+)\(.*\1.* fused, it moves .*writes",
    ),
    "outputs read again": (
        counted(distinct, lambda p, o: fused(p, o) + len(set(o) & set(reads_of(p)))),
        "fused, it",
    ),
    "every result written": (
        counted(distinct, lambda p, o: len(inputs_of(p)) + len(p)),
        "fused, it",
    ),
    "scalars are inputs": (
        counted(distinct, lambda p, o: len({a for s in p for a in s[2:]} - set(results_of(p))) + 1),
        "fused, it",
    ),
    "all that is named": (
        counted(distinct, lambda p, o: len(set(reads_of(p)) | set(results_of(p)))),
        "fused, it",
    ),
    # Its form.
    "a sum": (lambda *c: sum(solution(*c)), "return a pair"),
    "unfused alone": (lambda *c: solution(*c)[0], "return a pair"),
    "nothing": (lambda *c: None, "return a pair, unfused and fused bytes, not None"),
    "strings": (lambda *c: tuple(map(str, solution(*c))), "needs a number of bytes"),
    "truth": (lambda *c: (True, True), "needs a number of bytes"),
    "raises": (lambda *c: {}["x"], "KeyError"),
}


@pytest.mark.parametrize("answer, hint", WRONG_TRAFFIC.values(), ids=WRONG_TRAFFIC)
def test_wrong_traffic_is_rejected_with_the_smallest_program(capsys, answer, hint):
    said = verdict(capsys, "04.1", answer)
    assert re.search(hint, said), said
    assert said.count(";") <= 4 and len(said) < 400  # three operations at most


def test_the_hint_reads_well(capsys):
    said = verdict(capsys, "04.1", WRONG_TRAFFIC["twice is two reads"][0])
    assert re.fullmatch(
        r"not yet. for \[(\w+) = \w+\((\w+), \2\)\] with outputs \1 and n = (\d+), unfused, "
        r"it moves [\d,]+ bytes, 2 tensors, not [\d,]+: \w+ reads \2 and writes \1",
        said,
    ), said
