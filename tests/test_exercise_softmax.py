"""The checkers of exercises 08.1 to 08.3 take what is right, and say what is wrong."""

import re
from types import SimpleNamespace

from helpers.device import interpreting, triton_version

# isort: split
import numpy as np
import pytest
import torch
from verdicts import verdict

from helpers import ptx
from helpers.exercises import written_triton
from helpers.triton_mode import MISSING, tl, triton

needs_triton = pytest.mark.skipif(not triton_version(), reason="Triton is not installed")
interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
INF = float("inf")

REQUESTS = []  # what the tests have not compiled yet: one child process is enough for all


@pytest.fixture
def compile_later(monkeypatch):
    def later(requests):
        REQUESTS.extend(requests)
        return [SimpleNamespace(ptx="") for _ in requests]

    monkeypatch.setattr(ptx, "triton_compile_many", later)


# 08.1: what the five kernels move


def count_bytes(rows, columns, itemsize):
    mn, m = rows * columns, rows
    reads = mn + (mn + m) + mn + mn + (mn + m)
    writes = m + mn + mn + m + mn
    return (reads + writes) * itemsize


def least_ms(number_of_bytes, gb_per_s):
    return number_of_bytes / (gb_per_s * 1e9) * 1e3


def elements(mn_factor, m_factor, index_bytes=0):
    return lambda rows, columns, size: (
        (mn_factor * rows * columns + m_factor * rows) * size + index_bytes * rows
    )


@pytest.mark.parametrize(
    "right",
    [
        count_bytes,
        elements(8, 4, 8),  # the maxima's indices, too
        lambda m, n, size: float(count_bytes(m, n, size)),
        lambda m, n, size: np.int64(count_bytes(m, n, size)),
    ],
)
def test_right_bytes(capsys, right):
    assert verdict(capsys, "08.1", right, least_ms) == "correct."


def test_the_lecture_takes_12_ms():
    assert round(least_ms(count_bytes(16384, 16384, 4), 716.8), 2) == 11.98


FIRST_BYTES = r"^not yet\. for 16,384 rows of 16,384 columns in fp32 it moves 8,590,196,736 bytes, "
WRONG_BYTES = {
    "the lecture's reads": (elements(8, 3), r"yours are 8 MN \+ 3 M .*reads the M maxima.*one of"),
    "these, with indices": (elements(8, 3, 8), r"yours are 8 MN \+ 5 M .*one of the two"),
    "reads": (elements(5, 2), r"5 MN \+ 2 M elements; .*reads alone, 7\.49 ms instead of 11\.98"),
    "the lecture's alone": (elements(5, 1), "reads alone, 7.49 ms instead of 11.98 ms at 716.8"),
    "writes": (elements(3, 2), r"writes alone, 4\.49 ms instead of 11\.98 ms at 716\.8 GB/s"),
    "writes and indices": (elements(3, 2, 8), "writes alone, 4.49 ms"),
    "fused": (elements(2, 0), r"yours are 2 MN elements; .*one kernel for all, 3\.00 ms"),
    "no maxima and sums": (elements(8, 0), "yours are 8 MN elements; the maxima and the sums"),
    "these read, not written": (elements(8, 2), "the maxima and the sums, M elements each, are wr"),
    "maximum and sum fused": (elements(6, 2), r"yours are 6 MN \+ 2 M .*through the five kernels"),
    "elements": (lambda m, n, size: 8 * m * n + 4 * m, "these are elements, and each has 4 bytes"),
    "bits": (lambda m, n, size: 8 * count_bytes(m, n, size), "through the five kernels"),
    "GiB": (lambda m, n, size: count_bytes(m, n, size) / 2**30, "not 8.0"),
    "negative": (lambda m, n, size: -count_bytes(m, n, size), "through the five kernels"),
}


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_wrong_bytes(capsys, name):
    wrong, hint = WRONG_BYTES[name]
    said = verdict(capsys, "08.1", wrong, least_ms)
    assert re.search(FIRST_BYTES + ".*" + hint, said), said
    assert len(said) < 400


SMALL = r"^not yet\. for (1,000|16,384|7|1|0) rows of .* it moves .*: "
WRONG_ELSEWHERE = {
    "fp32 always": (
        lambda m, n, size: count_bytes(m, n, 4),
        "in bf16 .*an element has 2 bytes, as the third argument says",
    ),
    "a square": (lambda m, n, size: count_bytes(m, m, size), SMALL + "what do the kernels"),
    "columns for rows": (lambda m, n, size: count_bytes(n, m, size), "for 1,000 rows of 3 columns"),
    "by heart": (lambda m, n, size: 8_590_196_736, "for 1,000 rows of 3 columns in fp32"),
    "indices of an element's size": (elements(8, 6), r"for 16,384 rows of .* in bf16 .*MN \+ 6 M"),
    "int32 indices": (elements(8, 4, 4), r"^not yet\. for 16,384.*yours are 8 MN \+ 5 M"),
    "a minimum of one row": (lambda m, n, size: count_bytes(max(m, 1), n, size), "for 0 rows of"),
    "None": (lambda m, n, size: None, "needs a number of bytes, not None"),
    "two": (lambda m, n, size: (1, 2), r"needs a number of bytes, not \(1, 2\)"),
    "a tensor": (lambda m, n, size: torch.tensor([8.0]), "count_bytes needs a number of .*tensor"),
    "a boolean": (lambda m, n, size: True, "needs a number of bytes, not True"),
}


@pytest.mark.parametrize("name", WRONG_ELSEWHERE)
def test_wrong_bytes_elsewhere(capsys, name):
    wrong, hint = WRONG_ELSEWHERE[name]
    said = verdict(capsys, "08.1", wrong, least_ms)
    assert re.search(hint, said), said


WRONG_TIMES = {
    "2^30": (
        lambda b, gb: b / (gb * 2**30) * 1e3,
        r"at 716\.8 GB/s take 11\.9841 ms, not 11\.161.*10\^9 bytes, not 2\^30",
    ),
    "seconds": (lambda b, gb: b / (gb * 1e9), "these are seconds"),
    "microseconds": (lambda b, gb: b / (gb * 1e9) * 1e6, "these are microseconds"),
    "GB per s for bytes per s": (lambda b, gb: b / gb, "take 11.9841 ms, not 1.198"),
    "inverse": (lambda b, gb: gb * 1e6 / b if b else 0, "take 11.9841 ms, not 0.083"),
    "the lecture's bandwidth": (lambda b, gb: b / 716.8e6, "at 4000 GB/s take 0.25 ms"),
    "rounded": (lambda b, gb: round(b / gb / 1e6, 2), "not 11.98"),
    "bytes at least": (lambda b, gb: (b or 1) / gb / 1e6, "0 bytes .* take 0 ms"),
    "None": (lambda b, gb: None, "needs a number of milliseconds"),
}


@pytest.mark.parametrize("name", WRONG_TIMES)
def test_wrong_times(capsys, name):
    wrong, hint = WRONG_TIMES[name]
    said = verdict(capsys, "08.1", count_bytes, wrong)
    assert re.search(hint, said), said


# 08.2: merge


def merge(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    base = torch.where(m == -INF, 0, m)
    return m, da * torch.exp(ma - base) + db * torch.exp(mb - base)


def by_where_on_the_sum(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    d = da * torch.exp(ma - m) + db * torch.exp(mb - m)
    return m, torch.where(m == -INF, 0.0, d)


def scaling_only_the_smaller(a, b):
    (ma, da), (mb, db) = a, b
    larger = ma >= mb
    m = torch.where(larger, ma, mb)
    scale = torch.where(ma == mb, 1.0, torch.exp(-(ma - mb).abs()))
    return [m, torch.where(larger, da + db * scale, da * scale + db)]


def with_a_finite_floor(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    base = m.clamp(min=torch.finfo(m.dtype).min)
    return m, (ma - base).exp() * da + (mb - base).exp() * db


def empty_first(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    scales = [torch.where(each == -INF, 0.0, torch.exp(each - m)) for each in (ma, mb)]
    return m, da * scales[0] + db * scales[1]


def stacked(a, b):
    m, d = (torch.stack(each) for each in zip(a, b, strict=True))
    top = m.amax(0)
    return top, (d * (m - top.nan_to_num(neginf=0)).exp()).sum(0)


@pytest.mark.parametrize(
    "right",
    [
        merge,
        by_where_on_the_sum,
        scaling_only_the_smaller,
        with_a_finite_floor,
        empty_first,
        stacked,
        lambda a, b: merge(b, a),
    ],
)
def test_right_merges(capsys, right):
    assert verdict(capsys, "08.2", right) == "correct."


def wrong_merge(sum_of, maximum=torch.maximum):
    """m and d, d from both pairs, m, and m made finite."""

    def wrong(a, b):
        m = maximum(a[0], b[0])
        return m, sum_of(*a, *b, m, torch.where(m == -INF, 0, m))

    return wrong


def naive(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    return m, da * torch.exp(ma - m) + db * torch.exp(mb - m)


def zero_for_nothing(a, b):
    m, d = merge(a, b)
    return torch.where(m == -INF, 0, m), d


def lowest_for_nothing(a, b):
    m, d = merge(a, b)
    return m.nan_to_num(), d


def hides_nan(a, b):
    m, d = naive(a, b)
    return m, d.nan_to_num()


def hides_nan_with_where(a, b):
    m, d = naive(a, b)
    return m, torch.where(d.isnan(), 0, d)


def in_place(a, b):
    m, d = merge(a, b)
    return m, a[1].copy_(d)


def maximum_in_place(a, b):
    m, d = merge(a, b)
    return torch.maximum(*(each[0] for each in (a, b)), out=b[0]), d


def with_if(a, b):
    (ma, da), (mb, db) = a, b
    return (ma, da + db * (mb - ma).exp()) if ma > mb else (mb, da * (ma - mb).exp() + db)


def with_any(a, b):
    (ma, da), (mb, db) = a, b
    if (ma > mb).any():
        return ma, da + db * (mb - ma).exp()
    return mb, da * (ma - mb).exp() + db


def over_everything(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb).amax().expand_as(ma)
    return m, da * (ma - m).exp() + db * (mb - m).exp()


def log_of_sums(a, b):
    (ma, da), (mb, db) = a, b
    m = torch.maximum(ma, mb)
    base = torch.where(m == -INF, 0, m)
    return m, (torch.logaddexp(ma + da.log(), mb + db.log()) - base).exp()


def keeps_the_identity_of_a(a, b):
    m, d = merge(a, b)
    empty = a[0] == -INF
    return torch.where(empty, a[0], m), torch.where(empty, a[1], d)


HERE = r"^not yet\. for \(1\.0, 2\.0\) and \(3\.0, 1\.5\), "
SECOND = r"^not yet\. for \(2\.0, 1\.5\) and \(-1\.0, 3\.0\), "
WRONG_MERGES = {
    "naive": (naive, r"^not yet\. for two parts with nothing.* d is nan, not 0: -inf - \(-inf\)"),
    "unscaled": (
        wrong_merge(lambda ma, da, mb, db, m, base: da + db),
        HERE + r"d is 3\.5, not 1\.77067: each sum has to be scaled from its own maximum",
    ),
    "sign": (
        wrong_merge(lambda ma, da, mb, db, m, base: da * (m - ma).exp() + db * (m - mb).exp()),
        HERE + r"d is .*: the scale is exp\(m_a - m\), never above 1",
    ),
    "the other's": (
        wrong_merge(lambda ma, da, mb, db, m, base: da * (mb - m).exp() + db * (ma - m).exp()),
        HERE + "d is .* scaled from the other's maximum",
    ),
    "a's factor for both": (
        wrong_merge(lambda ma, da, mb, db, m, base: (da + db) * (ma - m).exp()),
        HERE + "d is .* b's sum is scaled with a's factor",
    ),
    "scaled to m_b": (
        wrong_merge(lambda ma, da, mb, db, m, base: da * (ma - mb).exp() + db),
        SECOND + "d is .* scaled to m_b, which need not be the larger",
    ),
    "scaled to m_a": (
        wrong_merge(lambda ma, da, mb, db, m, base: da + db * (mb - ma).exp()),
        HERE + "d is .* scaled to m_a, which need not be the larger",
    ),
    "scaled to the smaller": (
        wrong_merge(
            lambda ma, da, mb, db, m, base: (
                da * (ma - torch.minimum(ma, mb)).exp() + db * (mb - torch.minimum(ma, mb)).exp()
            )
        ),
        HERE + r"d is 13\.08.* scaled to m_a",
    ),
    "both scaled": (
        wrong_merge(lambda ma, da, mb, db, m, base: (da + db) * (ma - base).exp()),
        HERE + "d is .*not 1.77067",
    ),
    "powers of two": (
        wrong_merge(lambda ma, da, mb, db, m, base: da * (ma - base).exp2() + db),
        HERE + "d is .*not 1.77067",
    ),
    "m_b always": (
        lambda a, b: (b[0], a[1] * (a[0] - b[0]).exp() + b[1]),
        SECOND + "m is -1, not 2: the larger of m_a and m_b",
    ),
    "m_a always": (
        wrong_merge(lambda ma, da, mb, db, m, base: da, lambda ma, mb: ma),
        HERE + "m is 1, not 3: the larger",
    ),
    "maxima added": (
        wrong_merge(lambda ma, da, mb, db, m, base: da + db, torch.add),
        HERE + "m is 4, not 3",
    ),
    "the sum's log": (
        wrong_merge(lambda ma, da, mb, db, m, base: da, torch.logaddexp),
        HERE + r"m is 3\.12.*, not 3",
    ),
    "one for all": (over_everything, r"for several elements at once, m is 5, not 4"),
    "an if": (with_if, "for several elements at once, an `if` or max.* torch.where"),
    "Python's max": (
        wrong_merge(lambda ma, da, mb, db, m, base: merge((ma, da), (mb, db))[1], max),
        "for several elements at once, an `if` or max",
    ),
    "any": (with_any, r"for several elements at once, m is 1, not 4"),
    "d in place": (in_place, HERE + "it changes its inputs in place"),
    "m in place": (maximum_in_place, SECOND + "it changes its inputs in place"),
    "0 for nothing": (
        zero_for_nothing,
        "two parts with nothing.* m is 0, not -inf: the maximum of",
    ),
    "the lowest for nothing": (lowest_for_nothing, "two parts with nothing.* not -inf: the maxi"),
    "nan_to_num": (hides_nan, r"where a sum is NaN, d is 0, not nan: .*would hide that"),
    "where isnan": (hides_nan_with_where, "where a sum is NaN, d is 0, not nan"),
    "a empty": (keeps_the_identity_of_a, r"nothing in it, a = \(-inf, 0\), m is -inf, not 1"),
    "logarithms": (log_of_sums, r"for maxima of .*10000 and 9999, d is .*, not"),
    "fp64": (lambda a, b: tuple(each.double() for each in merge(a, b)), "m has to be fp32"),
    "half": (lambda a, b: (merge(a, b)[0], merge(a, b)[1].half()), "d has to be fp32"),
    "numbers": (lambda a, b: tuple(map(float, merge(a, b))), HERE + "m has to be a tensor"),
    "a sum over all": (lambda a, b: (merge(a, b)[0], merge(a, b)[1].sum()), "d has to be a tensor"),
    "m alone": (lambda a, b: torch.maximum(a[0], b[0]), "return a pair of tensors"),
    "d first": (lambda a, b: merge(a, b)[::-1], HERE + "m is 1.77.*, not 3"),
    "one argument": (lambda pairs: pairs, "It raises TypeError"),
    "exact no more": (
        wrong_merge(
            lambda ma, da, mb, db, m, base: (
                (da * (ma - base).exp() + db * (mb - base).exp()) * 1.00002
            )
        ),
        HERE + "d is",
    ),
    "small ones lost": (
        wrong_merge(
            lambda ma, da, mb, db, m, base: (
                torch.where(ma - base > -6, da * (ma - base).exp(), 0) + db * (mb - base).exp()
            )
        ),
        "^not yet. for rows .* merged .*, d is",
    ),
}


@pytest.mark.parametrize("name", WRONG_MERGES)
def test_wrong_merges(capsys, name):
    wrong, hint = WRONG_MERGES[name]
    said = verdict(capsys, "08.2", wrong)
    assert re.search(hint, said, re.DOTALL), said
    assert len(said) < 400


# 08.3: rows wider than a block. A kernel's source must be in a file: every kernel stands here.


@triton.jit
def online(x_ptr, y_ptr, columns, BLOCK: tl.constexpr, WRONG: tl.constexpr = ""):
    row = tl.program_id(0).to(tl.int64) * columns
    m = -float("inf")
    d = 0.0
    if WRONG == "m from 0":
        m = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < columns
        if WRONG == "padding 0":
            x = tl.load(x_ptr + row + i, mask=mask, other=0.0)
        elif WRONG == "no other":
            x = tl.load(x_ptr + row + i, mask=mask)
        elif WRONG == "mask of the whole":
            mask = row + i < columns * tl.num_programs(0)
            x = tl.load(x_ptr + row + i, mask=mask, other=-float("inf"))
        elif WRONG == "load not masked":
            x = tl.load(x_ptr + row + i)
        else:
            x = tl.load(x_ptr + row + i, mask=mask, other=-float("inf"))
        new_m = tl.maximum(m, tl.max(x, axis=0))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        terms = tl.exp(x - base)
        if WRONG == "d before m":
            d = d + tl.sum(tl.exp(x - m), axis=0)
        elif WRONG == "m before the scale":
            m = new_m
            d = d * tl.exp(m - base) + tl.sum(terms, axis=0)
        elif WRONG == "unscaled":
            d = d + tl.sum(terms, axis=0)
        elif WRONG == "new minus old":
            d = d * tl.exp(base - m) + tl.sum(terms, axis=0)
        elif WRONG == "new minus old, but for the first":
            d = d * tl.where(m == -float("inf"), 1.0, tl.exp(base - m)) + tl.sum(terms, axis=0)
        elif WRONG == "new terms scaled, too":
            d = tl.where(m == -float("inf"), 1.0, tl.exp(m - base)) * (d + tl.sum(terms, axis=0))
        elif WRONG == "last tile's sum":
            d = tl.sum(terms, axis=0)
        elif WRONG == "naive" or WRONG == "NaN hidden":
            d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        elif WRONG == "tiles' maxima":
            new_m = tl.max(x, axis=0)
            d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        elif WRONG == "sum of the padding":
            d = d * tl.exp(m - base) + tl.sum(tl.where(mask, terms, 1.0), axis=0)
        elif WRONG == "atomics":
            d = d * tl.exp(m - base) + tl.sum(terms, axis=0)
            tl.atomic_xchg(y_ptr + row + i, x, mask=mask)
        else:
            d = d * tl.exp(m - base) + tl.sum(terms, axis=0)
        m = new_m
    if WRONG == "NaN hidden":
        d = tl.where(d == d, d, 1.0)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < columns
        x = tl.load(x_ptr + row + i, mask=mask)
        y = tl.exp(x - m) / d
        if WRONG == "not divided":
            y = tl.exp(x - m)
        if WRONG == "reversed":
            tl.store(y_ptr + row + columns - 1 - i, y, mask=mask)
        elif WRONG == "tiles exchanged":
            whole = columns // BLOCK * BLOCK
            j = tl.where(start < whole, whole - BLOCK - start + tl.arange(0, BLOCK), i)
            tl.store(y_ptr + row + j, y, mask=mask)
        elif WRONG == "another row":
            last = (tl.num_programs(0) - 1).to(tl.int64) * columns
            tl.store(y_ptr + last - row + i, y, mask=mask)
        elif WRONG == "store not masked":
            tl.store(y_ptr + row + i, y)
        elif WRONG == "mask of the whole":
            tl.store(y_ptr + row + i, y, mask=row + i < columns * tl.num_programs(0))
        elif WRONG == "x changed":
            tl.store(x_ptr + row + i, y, mask=mask)
            tl.store(y_ptr + row + i, y, mask=mask)
        elif WRONG == "fp64":
            tl.store(y_ptr + row + i, (y.to(tl.float64) * 1.5 / 1.5).to(tl.float32), mask=mask)
        elif WRONG == "row sum in y":
            tl.store(y_ptr + row + i, y * 0 + 1.0 / columns, mask=mask)
        else:
            tl.store(y_ptr + row + i, y, mask=mask)


def wide(kernel, block=256, **more):
    """A wrapper as the notebook has it, around a kernel of the same parameters."""

    def my_softmax(x, y):
        rows, columns = x.shape
        if rows:
            kernel[(rows,)](x, y, columns, BLOCK=block, **more)

    return my_softmax


def wrong(name, block=256):
    return wide(online, block, WRONG=name)


@triton.jit
def with_exp2(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * columns
    y_ptr += tl.program_id(0) * columns
    m = -float("inf")
    d = 0.0
    for start in tl.range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < columns, other=-float("inf")) * 1.4426950408889634
        new_m = tl.maximum(m, tl.max(x, axis=0))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        d = d * tl.exp2(m - base) + tl.sum(tl.exp2(x - base), axis=0)
        m = new_m
    for start in tl.range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < columns) * 1.4426950408889634
        tl.store(y_ptr + i, tl.exp2(x - m) / d, mask=i < columns)


@triton.jit
def while_loops(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m, d, start = -3.4e38, 0.0, 0
    while start < columns:
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        old = m
        m = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(old - m) + tl.sum(tl.exp(x - m), axis=0)
        start += BLOCK
    while start > 0:  # from the last tile, which is the likeliest to be in the cache
        start -= BLOCK
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


@triton.jit
def a_pair_a_lane(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """Each lane has its own (m, d); they merge once, at the end."""
    row = tl.program_id(0) * columns
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    d = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        new_m = tl.maximum(m, x)
        same = new_m == -float("inf")
        d = tl.where(same, 0.0, d * tl.exp(m - new_m) + tl.exp(x - new_m))
        m = new_m
    top = tl.max(m, axis=0)
    total = tl.sum(d * tl.exp(m - top), axis=0)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - top) * (1 / total), mask=i < columns)


@triton.jit
def with_strides(x_ptr, y_ptr, rows, columns, x_stride, y_stride, BLOCK: tl.constexpr):
    """Two rows a program, addressed by their strides."""
    r = 2 * tl.program_id(0) + tl.arange(0, 2)[:, None]
    m = tl.full((2, 1), -float("inf"), tl.float32)
    d = tl.zeros((2, 1), tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        mask = (r < rows) & (i < columns)
        x = tl.load(x_ptr + r * x_stride + i, mask=mask, other=-float("inf"))
        new_m = tl.maximum(m, tl.max(x, axis=1, keep_dims=True))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        d = d * tl.exp(m - base) + tl.sum(tl.exp(x - base), axis=1, keep_dims=True)
        m = new_m
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        mask = (r < rows) & (i < columns)
        x = tl.load(x_ptr + r * x_stride + i, mask=mask, other=0.0)
        tl.store(y_ptr + r * y_stride + i, tl.exp(x - m) / d, mask=mask)


def two_rows_a_program(x, y):
    rows, columns = x.shape
    if x.numel():
        grid = (triton.cdiv(rows, 2),)
        if rows == 2:
            grid = (2,)  # the second has none
        with_strides[grid](x, y, rows, columns, x.stride(0), y.stride(0), BLOCK=512)


@triton.jit
def persistent(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    for r in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = r * columns
        m = -float("inf")
        d = 0.0
        for start in range(0, columns, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
            new_m = tl.maximum(m, tl.max(x, axis=0))
            if new_m > -float("inf"):
                d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
            m = new_m
        for start in range(0, columns, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row + i, mask=i < columns)
            tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


def two_programs(x, y):
    if x.numel():
        persistent[(2,)](x, y, *x.shape, BLOCK=256)


def smaller_blocks_for_short_rows(x, y):
    rows, columns = x.shape
    if x.numel():
        block = min(1024, triton.next_power_of_2(columns))
        online[(rows,)](x, y, columns, BLOCK=block)


RIGHT = {
    "the notebook's": wide(online),
    "a large block, more warps": wide(online, 2048, num_warps=8),
    "one warp": wide(online, num_warps=1),
    "exp2": wide(with_exp2),
    "while, backwards, from a finite maximum": wide(while_loops, 1024),
    "a pair a lane": wide(a_pair_a_lane),
    "two rows a program": two_rows_a_program,
    "two programs for all rows": two_programs,
    "smaller blocks for short rows": smaller_blocks_for_short_rows,
}


@needs_triton
@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_written_kernels_are_right(capsys, compile_later, answer):
    assert verdict(capsys, "08.3", answer) == "correct."


@triton.jit
def no_maximum(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    d = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        d += tl.sum(tl.exp(x), axis=0)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x) / d, mask=i < columns)


@triton.jit
def first_tiles_maximum(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    i = tl.arange(0, BLOCK)
    first = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
    m = tl.max(first, axis=0)
    d = tl.sum(tl.exp(first - m), axis=0)
    for start in range(BLOCK, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        d += tl.sum(tl.exp(x - m), axis=0)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


@triton.jit
def three_looks(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m = -float("inf")
    d = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        m = tl.maximum(m, tl.max(x, axis=0))
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        d += tl.sum(tl.exp(x - m), axis=0)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


@triton.jit
def tile_by_tile(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + row + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def first_tile_alone(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def whole_tiles_alone(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m = -float("inf")
    d = 0.0
    for start in range(0, tl.maximum(columns // BLOCK, 1) * BLOCK, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        new_m = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        m = new_m
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


@triton.jit
def written_twice(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """exp(x - m) to y, divided there."""
    row = tl.program_id(0) * columns
    m = -3.4e38
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        m = tl.maximum(m, tl.max(x, axis=0))
    d = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=-float("inf"))
        d += tl.sum(tl.exp(x - m), axis=0)
        tl.store(y_ptr + row + i, tl.exp(x - m), mask=i < columns)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, y / d, mask=i < columns)


@triton.jit
def statistics(x_ptr, m_ptr, d_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m = -3.4e38
    d = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + i, mask=i < columns, other=-float("inf"))
        new_m = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        m = new_m
    tl.store(m_ptr + row, m)
    tl.store(d_ptr + row, d)


@triton.jit
def from_statistics(x_ptr, m_ptr, d_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + i, mask=i < columns)
    y = tl.exp(x - tl.load(m_ptr + row)) / tl.load(d_ptr + row)
    tl.store(y_ptr + row * columns + i, y, mask=i < columns)


MINUS_INFINITY = -float("inf")


@triton.jit
def plain_global(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    m = -3.4e38
    d = 0.0
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns, other=MINUS_INFINITY)
        new_m = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        m = new_m
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + i, mask=i < columns)
        tl.store(y_ptr + row + i, tl.exp(x - m) / d, mask=i < columns)


@triton.jit
def from_m(x_ptr, m_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < columns) - tl.load(m_ptr)
    tl.store(y_ptr + i, x, mask=i < columns)


def growing_block(x, y):
    rows, columns = x.shape
    if x.numel():
        online[(rows,)](x, y, columns, BLOCK=triton.next_power_of_2(columns))


def half_the_row(x, y):
    rows, columns = x.shape
    if x.numel():
        online[(rows,)](x, y, columns, BLOCK=max(256, triton.next_power_of_2(columns) // 2))


def one_program(x, y):
    if x.numel():
        persistent[(1,)](x, y, *x.shape, BLOCK=256)


def a_launch_a_row(x, y):
    for row in range(len(x)):
        online[(1,)](x[row], y[row], x.shape[1], BLOCK=256)


def two_kernels(x, y):
    rows, columns = x.shape
    if x.numel():
        m, d = torch.empty_like(x[:, 0]), torch.empty_like(x[:, 0])
        statistics[(rows,)](x, m, d, columns, BLOCK=256)
        grid = rows, triton.cdiv(columns, 256)
        from_statistics[grid](x, m, d, y, columns, BLOCK=256)


def pytorch_maximum(x, y):
    from_m[(1,)](x, x.amax(1), y, x.numel(), BLOCK=256)


def transposed(x, y):
    wide(online)(x.T, y.T)


HERE_ROWS = r"^not yet\. for \d+ rows? of "
LECTURE = r"^not yet\. for 2 rows of 3 columns \(the lecture's\), "
RESCALE = "the row is in proportion but sums to .*multiplied by exp.old m - new m"
# Name -> answer, and what the hint must say; on a GPU too unless it stands in SEEN_IN_INTERPRETER.
WRONG = {
    "no maximum": (wide(no_maximum), LECTURE + r"y\[1, 2\] is nan for x = 100.*exponential overfl"),
    "the first tile's maximum": (
        wide(first_tiles_maximum),
        "2049 columns of huge values, .*overflow",
    ),
    "d before m": (wrong("d before m"), LECTURE + "y.0, 0. is nan .*With the newest maximum"),
    "m before the scale": (
        wrong("m before the scale"),
        HERE_ROWS + r"257 columns .*, y\[0, 0\] is .*" + RESCALE,
    ),
    "m before the scale, a large block": (
        wrong("m before the scale", 1024),
        HERE_ROWS + "2049 columns whose values rise, .*" + RESCALE,
    ),
    "unscaled": (wrong("unscaled"), HERE_ROWS + "257 columns .*" + RESCALE),
    "new minus old": (wrong("new minus old"), LECTURE),
    "new minus old, but for the first": (
        wrong("new minus old, but for the first"),
        HERE_ROWS + "257 columns .*" + RESCALE,
    ),
    "new terms scaled, too": (
        wrong("new terms scaled, too"),
        HERE_ROWS + r"\d+ columns.*" + RESCALE,
    ),
    "the last tile's sum": (wrong("last tile's sum"), "257 columns .*divided by nothing or by 1"),
    "the tiles' maxima": (wrong("tiles' maxima"), "2049 columns whose values fall, .*overflow"),
    "not divided": (wrong("not divided"), LECTURE + r"y\[0, 0\] is 1 .*divided by nothing or by 1"),
    "each tile for itself": (
        wide(tile_by_tile),
        HERE_ROWS + "257 columns .*the row sums to 2, as many as it has tiles",
    ),
    "padding 0": (
        wrong("padding 0"),
        LECTURE + r"y\[0, 0\] is .*padding counts as exp\(0\): other",
    ),
    "no other": (wrong("no other"), LECTURE + r"y\[0, 0\] is "),  # a GPU may load what it likes
    "the padding's sum": (wrong("sum of the padding"), LECTURE + r"y\[0, 0\] is "),
    "m from 0": (
        wrong("m from 0"),
        "1001 columns of values below -100, .*maximum is -120.*is it mistaken for 0",
    ),
    "NaN at -inf": (
        wrong("naive"),
        HERE_ROWS + r"5001 columns of which many.* y\[0, \d+\] is nan .*-inf - \(-inf\) is NaN",
    ),
    "NaN hidden": (wrong("NaN hidden"), r"-inf, y\[0, \d+\] is .*divided by nothing or by 1"),
    "reversed": (wrong("reversed"), r"y\[\d, 0\] is .*the row has its values, but not in their"),
    "tiles exchanged": (
        wrong("tiles exchanged"),
        HERE_ROWS + "1000 columns, .*the row has its values, but not in their columns",
    ),
    "another row": (wrong("another row"), LECTURE + r"y\[0, 0\] is .*that is the softmax of row 1"),
    "1 / columns": (wrong("row sum in y"), LECTURE + r"y\[1, 0\] is 0\.3333"),
    "the first tile": (wide(first_tile_alone), "257 columns .*nothing is written to y.0, 256"),
    "whole tiles": (wide(whole_tiles_alone), "257 columns of which the last .*in proportion"),
    "load not masked": (wrong("load not masked"), LECTURE + r"block \d reads x\[6\].*load masked"),
    "store not masked": (wrong("store not masked"), LECTURE + r".* writes y\[6\].*store masked"),
    "mask of the whole": (wrong("mask of the whole"), LECTURE + ".*the next row counts as well"),
    "x changed": (wrong("x changed"), r"writes to x, which is an input|changes x"),
    "x and y exchanged": (lambda x, y: wide(online)(y, x), "writes to x|changes x"),
    "three looks": (
        wide(three_looks),
        r"the values are right, but it reads x\[0, 0\] 3 times: twice is enough, the maximum and",
    ),
    "written twice": (wide(written_twice), r"it writes y\[0, 0\] 2 times: once is enough"),
    "atomics": (wrong("atomics"), "atomics"),
    "fp64": (wrong("fp64"), "its PTX has .* fp64 instructions"),
    "a plain global": (
        wide(plain_global),
        "(Triton's compiler says|CompilationError).*global",
    ),
    "a block of 1000": (wide(online, 1000), "the size of a block must be a power of two"),
    "a block as the row": (growing_block, "its block grows with the row, to 8192 for 5,001"),
    "a block of half the row": (half_the_row, "its block grows with the row, to 4096 for 5,001"),
    "the whole row": (wide(online, 8192), "a block of 8192 holds 5,001 columns whole"),
    "one program": (
        one_program,
        "for 16 rows of 300 columns.*one program does all rows, on one SM",
    ),
    "a launch a row": (a_launch_a_row, LECTURE + "the values are right, but it launches 2 kernels"),
    "two kernels": (two_kernels, "neither x's nor y's|launches 2 kernels"),
    "PyTorch": (lambda x, y: y.copy_(x.softmax(1)), LECTURE + "it calls PyTorch's _?softmax"),
    "PyTorch's maximum": (pytorch_maximum, LECTURE + "it calls PyTorch's amax"),
    "transposed": (transposed, LECTURE + r"y\[0, 0\] is 0\.5 "),
    "an empty grid": (
        lambda x, y: online[(x.shape[0],)](x, y, x.shape[1], BLOCK=256),
        r"for 0 rows of 256 columns, a grid of \(0,\) is launched",
    ),
    "nothing": (lambda x, y: x, LECTURE + "no Triton kernel is launched"),
    "returned": (lambda x: x, "It raises TypeError"),
}
SEEN_IN_INTERPRETER = {"load not masked", "three looks", "written twice", "atomics", "fp64"}


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected_with_a_hint(capsys, name):
    if name in SEEN_IN_INTERPRETER and not interpreting():
        pytest.skip("only the interpreter shows what a kernel reads")
    answer, hint = WRONG[name]
    said = verdict(capsys, "08.3", answer)
    assert re.search(hint, said, re.DOTALL), said
    assert len(said) < 900 and "Traceback" not in said


@needs_triton
@interpreted
def test_compiled_kernels_tell_their_block_by_its_constant(capsys, monkeypatch):
    monkeypatch.setattr(written_triton, "interpreting", lambda: False)  # as if nothing were watched
    for name in ("a block as the row", "a block of half the row", "the whole row"):
        answer, hint = WRONG[name]
        assert re.search(hint, verdict(capsys, "08.3", answer))


@needs_triton
@interpreted
def test_what_was_right_compiles():
    ptx.triton_compile_many(REQUESTS)


@needs_triton
@interpreted
def test_without_the_compiler_right_values_are_enough(capsys, monkeypatch):
    def missing(*_):
        raise ptx.ToolMissing("Triton is missing")

    monkeypatch.setattr(ptx, "triton_compile_many", missing)
    assert verdict(capsys, "08.3", wide(plain_global)) == "correct."


@triton.jit
def nothing(x_ptr, BLOCK: tl.constexpr):
    pass


@needs_triton
@interpreted
def test_numpy_beside_an_empty_kernel_is_seen(capsys):
    def my_softmax(x, y):
        e = np.exp(x.numpy() - x.numpy().max(1, keepdims=True, initial=-np.inf))
        y.numpy()[:] = e / e.sum(1, keepdims=True)
        if len(x):
            nothing[(len(x),)](x, BLOCK=256)

    said = verdict(capsys, "08.3", my_softmax)
    assert re.search(r"y\[0, 0\] is not written by a Triton kernel", said)


def test_without_triton_one_sentence_says_so(capsys):
    def launches(x, y):
        raise ptx.ToolMissing(MISSING)

    said = verdict(capsys, "08.3", launches)
    assert said == f"it cannot be checked on this machine: {MISSING}"
