"""Our kernels beside their peers: wrong ones are not timed, and the table keeps what it had."""

import math
import sys
import types

import pandas as pd
import pytest
import torch

from helpers import (
    bench,
    compute_roofs,
    matmul_peers,
    peer_cases,
    peers,
    results,
    softmax_peers,
)
from helpers.check import assert_close
from helpers.device import has_cuda, triton_version
from helpers.kernels import gelu, matmul, softmax

EXPECTED = torch.arange(8.0, dtype=torch.float64)


def case(peer_functions: dict, ours=None, **fields) -> peers.Case:
    """Functions that return a tensor; right is EXPECTED."""
    return peers.Case(
        **{"operation": "op", "dtype": "float32", "shape": "8"} | fields,
        ours=ours or right(),
        peers=peer_functions,
        ceiling=("copy", right()),
        check=lambda run: assert_close(run(), EXPECTED),
    )


def right():
    return lambda: EXPECTED.clone()


def wrong():
    return lambda: EXPECTED + 1


def failing(message: str):
    def run():
        raise RuntimeError(message)

    return run


@pytest.fixture
def times(monkeypatch):
    """function -> the samples (ms) of a measurement, or an iterator with those of each; 1 ms for
    other functions. "order": what was measured."""
    given, measured = {}, []

    def measure(run, budget_ms):
        measured.append(run)
        samples = given.get(run, [1.0])
        return types.SimpleNamespace(
            samples_ms=samples if isinstance(samples, list) else next(samples)
        )

    monkeypatch.setattr(bench, "measure", measure)
    given["order"] = measured
    return given


def test_ratios_are_of_speeds(times):
    fast, slow, ours = right(), right(), right()
    times |= {fast: [3.0], slow: [9.0], ours: [2.0]}
    rows, left_out = peers.compare(case({"fast": fast, "slow": slow}, ours))
    assert left_out == ""
    assert [(row["peer"], row["peer_ms"]) for row in rows] == [("fast", 3.0), ("slow", 9.0)]
    for row in rows:
        assert set(row) == set(peers.COLUMNS)
        assert (row["operation"], row["dtype"], row["shape"]) == ("op", "float32", "8")
        assert (row["ours_ms"], row["ceiling_ms"]) == (2.0, 1.0)
        assert row["ratio_to_best_peer"] == 1.5  # the fastest peer takes half as long again
        assert row["fraction_of_ceiling"] == 0.5
        assert f"torch {torch.__version__}" in row["versions"]


def test_a_slower_kernel_of_ours_has_a_ratio_below_1(times):
    fast, ours = right(), right()
    times |= {fast: [1.0], ours: [4.0]}
    (row,) = peers.compare(case({"fast": fast}, ours))[0]
    assert row["ratio_to_best_peer"] == 0.25


def test_the_median_is_of_all_rounds_and_they_alternate(times):
    peer, ours = right(), right()
    times[ours] = iter([[1.0, 1.0], [1.0, 1.0, 5.0], [9.0, 9.0, 9.0, 9.0]])  # in three rounds
    (row,) = peers.compare(case({"peer": peer}, ours), rounds=3)[0]
    assert row["ours_ms"] == 5.0
    order = times["order"]
    assert len(order) == 9 and order[:3] == order[3:6] == order[6:]
    assert len(set(order)) == 3 and {ours, peer} < set(order)


def test_ours_must_be_right(times):
    with pytest.raises(AssertionError, match="relative error"):
        peers.compare(case({"peer": right()}, wrong()))
    assert times["order"] == []  # nothing was timed


def test_peers_that_fail_or_are_wrong_are_left_out_and_named(times):
    good = right()
    rows, left_out = peers.compare(
        case(
            {
                "raises": failing("out of memory\nand much more\n"),
                "silent": failing(""),
                "wrong": wrong(),
                "absent": "flash-attn is not installed",
                "good": good,
            }
        )
    )
    assert [row["peer"] for row in rows] == ["good"]
    lines = left_out.splitlines()
    assert lines[0] == "op float32 8: raises left out: out of memory"
    assert lines[1] == "op float32 8: silent left out: RuntimeError"
    assert lines[2].startswith("op float32 8: wrong left out: relative error")
    assert lines[3] == "op float32 8: absent left out: flash-attn is not installed"
    assert len(lines) == 4
    assert len(set(times["order"])) == 3  # ours, the ceiling, the good one


def test_without_any_peer_ours_is_still_compared_with_the_ceiling(times):
    for none in ({}, {"absent": "not here"}):
        (row,), _ = peers.compare(case(none))
        assert (row["peer"], row["peer_ms"], row["ratio_to_best_peer"]) == ("", "", "")
        assert row["fraction_of_ceiling"] == 1.0
        assert set(row) == set(peers.COLUMNS)


# The table


def row(operation: str, ours_ms: float, peer: str = "p") -> dict:
    return dict.fromkeys(peers.COLUMNS, "") | {
        "operation": operation,
        "ours_ms": ours_ms,
        "peer": peer,
    }


def test_keep_replaces_the_same_operations_alone(tmp_path):
    file = tmp_path / "new" / "peers.csv"
    peers.keep([row("gelu", 1.0), row("gelu", 1.0, "q"), row("softmax", 2.0)], file)
    peers.keep([row("gelu", 5.0), row("matmul", 3.0)], file)
    table = pd.read_csv(file)
    assert list(table.columns) == peers.COLUMNS
    assert list(zip(table["operation"], table["ours_ms"], strict=True)) == [
        ("softmax", 2.0),
        ("gelu", 5.0),
        ("matmul", 3.0),
    ]
    assert [path.name for path in file.parent.iterdir()] == ["peers.csv"]


def test_keep_never_leaves_half_a_file(tmp_path, monkeypatch):
    file = tmp_path / "peers.csv"
    peers.keep([row("gelu", 1.0)], file)
    before = file.read_bytes()

    def killed(self, path, **_):
        path.write_text("operation,dt")
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_csv", killed)
    with pytest.raises(KeyboardInterrupt):
        peers.keep([row("gelu", 2.0)], file)
    assert file.read_bytes() == before


# The command


@pytest.fixture
def gpu(monkeypatch, times, tmp_path):
    """main() as on a GPU, with operations of our own, and the file that it writes."""
    monkeypatch.setattr(peers.machine, "has_cuda", lambda: True)
    monkeypatch.setattr(peers.machine, "slug", lambda: "some_gpu")
    monkeypatch.setattr(
        peers,
        "OPERATIONS",
        {
            "good": lambda: iter([case({"peer": right()}, operation="good")]),
            "bad": lambda: iter([case({"peer": right()}, wrong(), operation="bad")]),
        },
    )
    return tmp_path / "table.csv"


def test_all_operations_are_written(gpu, capsys):
    assert peers.main(["--output", str(gpu), "good"]) == 0
    assert list(pd.read_csv(gpu)["operation"]) == ["good"]
    assert "good" in capsys.readouterr().out


def test_a_wrong_kernel_fails_and_the_others_are_written(gpu, capsys):
    assert peers.main(["--output", str(gpu)]) == 1
    assert list(pd.read_csv(gpu)["operation"]) == ["good"]
    assert "bad float32 8: ours failed: relative error" in capsys.readouterr().err


def test_where_nothing_is_right_nothing_is_written(gpu):
    assert peers.main(["--output", str(gpu), "bad"]) == 1
    assert not gpu.exists()


def test_an_unknown_operation_is_refused(gpu, capsys):
    with pytest.raises(SystemExit) as stop:
        peers.main(["good", "nonsense"])
    assert stop.value.code == 2
    assert "there is no nonsense; there are good, bad" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers.machine, "has_cuda", lambda: False)
    output = tmp_path / "table.csv"
    assert peers.main(["cuda_gelu", "--output", str(output)]) == 2
    assert not output.exists()
    assert "no GPU" in capsys.readouterr().err


def test_the_table_is_named_after_the_device():
    assert peers.path().name == f"peers_{peers.machine.slug()}.csv"
    assert peers.path().parent.name == "measurements"


# The operations


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(peer_cases, "largest_power_of_2", lambda most: 4096)
    if not has_cuda():  # torch.compile takes seconds on a CPU, and is not what is tested
        monkeypatch.setattr(compute_roofs, "compiled", lambda function: function)
        monkeypatch.setattr(compute_roofs, "compiler_missing", lambda: "")


GELUS = {
    "cuda_gelu": {"pytorch", "torch.compile"},
    "triton_gelu": {"pytorch", "torch.compile", "cuda_gelu"},
    "triton_gelu_backward": {"pytorch", "torch.compile"},
}


@pytest.mark.parametrize("operation", GELUS)
def test_gelu_cases_are_right_and_their_check_sees_what_is_not(tiny, times, operation):
    cases = list(peer_cases.OPERATIONS[operation]())
    assert [c.dtype for c in cases[:3]] == ["float32", "float16", "bfloat16"]
    for one in cases[:3]:
        assert (one.operation, one.shape) == (operation, "4096")
        one.check(one.ours)
        assert set(one.peers) == GELUS[operation]
        for run in one.peers.values():
            one.check(run)
        with pytest.raises(AssertionError):
            one.check(one.ceiling[1])  # a copy is no GeLU
        with pytest.raises(AssertionError):
            one.check(lambda: None)  # what others wrote before does not count
        assert peers.compare(one)[1] == ""


def test_sizes_of_the_gelu_cases(monkeypatch):
    monkeypatch.setattr(peer_cases, "random_tensors", lambda *_: None)
    monkeypatch.setattr(peer_cases, "case_of", lambda *_: None)
    assert len(list(peer_cases.cuda_gelu_cases())) == 3
    assert len(list(peer_cases.triton_gelu_cases())) == 15


def test_the_check_of_gelu_sees_an_end_that_was_not_written(tiny, monkeypatch):
    """Values are compared in the first 2^20 elements alone; all the others must be there."""
    monkeypatch.setattr(peer_cases, "largest_power_of_2", lambda most: 2**21)
    launch = gelu.launch_cuda_gelu
    monkeypatch.setattr(gelu, "launch_cuda_gelu", lambda x, y: launch(x[:-8], y[:-8]))
    (one, *_) = peer_cases.cuda_gelu_cases()
    with pytest.raises(AssertionError, match="not all of the output was written"):
        one.check(one.ours)


def test_where_nothing_compiles_that_peer_has_a_reason(tiny, monkeypatch):
    monkeypatch.setattr(compute_roofs, "compiler_missing", lambda: "no C++ compiler")
    for one in peer_cases.cuda_gelu_cases():
        assert one.peers["torch.compile"] == "no C++ compiler"


@pytest.mark.case("E22")
def test_a_python_that_torch_compile_refuses_costs_that_peer_alone(tiny, times, monkeypatch):
    """Case E22."""

    def refuse(function):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(compute_roofs, "compiled", refuse)
    (one, *_) = peer_cases.cuda_gelu_cases()
    rows, left_out = peers.compare(one)
    assert [row["peer"] for row in rows] == ["pytorch"]
    assert "torch.compile left out: torch.compile is not supported on Python 3.99+" in left_out


def test_every_operation_is_measured_for_real(monkeypatch, tiny):
    """One round with the real clock: times are positive and ratios finite."""
    (one, *_) = peer_cases.cuda_gelu_cases()
    rows, _ = peers.compare(one, rounds=1, budget_ms=1)
    for found in rows:
        assert min(found["ours_ms"], found["peer_ms"], found["ceiling_ms"]) > 0
        assert math.isfinite(found["ratio_to_best_peer"])


# Matmul


@pytest.fixture
def small_sides(tiny, monkeypatch):
    monkeypatch.setattr(matmul_peers, "largest_power_of_2", lambda most: 128)


@pytest.fixture
def small_matmul(small_sides) -> peers.Case:
    (one,) = matmul_peers.cuda_matmul_cases()
    return one


def test_the_matmul_case_is_right_and_its_check_sees_what_is_not(small_matmul, times, monkeypatch):
    one = small_matmul
    assert (one.operation, one.dtype, one.shape) == ("cuda_matmul_tiled", "float32", "128x128x128")
    for run in (one.ours, one.peers["pytorch"], one.ceiling[1]):
        one.check(run)
    with pytest.raises(AssertionError):
        one.check(lambda: None)  # what others wrote before does not count
    rows, left_out = peers.compare(one)
    assert [row["peer"] for row in rows] == ["pytorch"]
    assert left_out.endswith("torch.compile left out: it calls the same kernel of cuBLAS")

    launch = matmul.launch_registers
    wrong = {
        "relative error": lambda a, b, c: launch(a.bfloat16().float(), b, c),
        "not all of the output": lambda a, b, c: launch(a[:-1], b, c[:-1]),
    }
    for message, broken in wrong.items():
        monkeypatch.setattr(matmul, "launch_registers", broken)
        with pytest.raises(AssertionError, match=message):
            one.check(one.ours)


def test_cublas_is_called_without_tf32_and_the_setting_comes_back(small_matmul, monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch, "mm", lambda *_, **__: seen.append(torch.get_float32_matmul_precision())
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        small_matmul.peers["pytorch"]()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


def test_a_small_card_gets_a_smaller_matmul(monkeypatch):
    monkeypatch.setattr(matmul_peers, "free_bytes", lambda: 24 * 100**2)
    (one,) = matmul_peers.cuda_matmul_cases()
    assert one.shape == "64x64x64"


def test_the_triton_matmuls_are_right_and_their_checks_see_what_is_not(
    small_sides, times, monkeypatch
):
    cases = list(matmul_peers.triton_matmul_cases())
    assert {one.dtype for one in cases} == {"bfloat16", "float16", "float32", "tfloat32"}
    layouts = {one.shape.removeprefix("128x128x128").strip() for one in cases}
    assert layouts == {"", "nt", "tn", "tt"}
    fused = list(matmul_peers.triton_matmul_gelu_cases())
    for one in (*cases[:2], *cases[-5:], fused[0]):
        for run in (one.ours, *(peer for peer in one.peers.values() if callable(peer))):
            one.check(run)
        with pytest.raises(AssertionError):
            one.check(lambda: None)  # what others wrote before does not count
    with pytest.raises(AssertionError):
        fused[0].check(fused[0].ceiling[1])  # the matmul alone is no GeLU
    assert peers.compare(fused[0])[1] == ""
    launch = matmul.launch_triton_matmul
    monkeypatch.setattr(matmul, "launch_triton_matmul", lambda a, b, c, *_: launch(a, b, c, None))
    with pytest.raises(AssertionError):
        fused[0].check(fused[0].ours)


def test_matmul_cases_are_of_all_sizes(monkeypatch):
    shapes = []
    monkeypatch.setattr(matmul_peers, "_case", lambda _, sizes, *__, **___: shapes.append(sizes))
    for cases in matmul_peers.OPERATIONS.values():
        list(cases())
    assert {(n, n, n) for n in (1024, 4095, 4096, 8192, 16384)} <= set(shapes)
    assert {(8192, 8192, k) for k in (512, 1024, 2048, 16384)} <= set(shapes)


# Softmax

SOFTMAX_PEERS = {  # columns -> the peers that run in fp32 where Liger's is not installed
    128: {"pytorch"},
    512: {"pytorch", "lecture"},
    1024: {"pytorch", "torch.compile"},
    16384: {"pytorch", "torch.compile", "lecture", "online"},
    65536: {"pytorch", "online"},
    131072: {"pytorch", "online"},
}


@pytest.fixture
def few_rows(tiny, monkeypatch):
    """64 rows of 128 columns, one of 8,192 and more."""
    monkeypatch.setattr(peer_cases, "largest_power_of_2", lambda most: 2**13)


@pytest.fixture
def no_liger(monkeypatch):
    monkeypatch.setattr(softmax_peers, "_liger", lambda: "No module named 'liger_kernel'")


def softmax_cases(monkeypatch, *columns: int) -> list[peers.Case]:
    monkeypatch.setattr(softmax_peers, "COLUMNS", columns)
    return list(peers.OPERATIONS["triton_softmax"]())


@pytest.mark.parametrize("columns", SOFTMAX_PEERS)
def test_softmax_cases_are_right_and_their_check_sees_what_is_not(
    few_rows, no_liger, times, monkeypatch, columns
):
    for one in softmax_cases(monkeypatch, columns):
        assert one.shape == f"{max(1, 2**13 // columns)}x{columns}"
        one.check(one.ours)
        runs = {name: run for name, run in one.peers.items() if callable(run)}
        assert set(runs) == SOFTMAX_PEERS[columns]
        for run in runs.values():
            one.check(run)
        for wrong in (one.ceiling[1], lambda: None):
            with pytest.raises(AssertionError):
                one.check(wrong)  # a copy is no softmax; what others wrote before does not count
        assert "liger left out: No module named" in peers.compare(one)[1]


def test_dtypes_and_widths_of_the_softmax_cases(tiny, no_liger, monkeypatch):
    """Where nothing is compiled it is said; 2^28 elements, or the most that whole rows allow."""
    seen = []

    def tensors(dtype, n, tensors, columns):
        seen.append((dtype, n, tensors, columns))
        return [torch.ones(1, columns, dtype=dtype)] * tensors

    monkeypatch.setattr(softmax_peers, "random_tensors", tensors)
    cases = list(softmax_peers.triton_softmax_cases())
    assert len(cases) == 25
    assert {columns for *_, columns in seen} == {
        *(128, 512, 1024, 4096, 5000, 10007, 16384, 20000, 32768, 65536, 131072, 262144)
    }
    assert [columns for dtype, *_, columns in seen if dtype == torch.float16] == [4096]
    for (_, n, count, columns), one in zip(seen, cases, strict=True):
        assert (n, count) == (2**28, 2)
        compiled = one.peers["torch.compile"]
        assert callable(compiled) == (
            columns in (1024, 4096, 16384, 32768) and one.dtype != "float16"
        )
        assert callable(compiled) or "not compiled" in compiled

    seen.clear()
    assert len(list(softmax_peers.triton_softmax_backward_cases())) == 8
    assert {(n, count) for _, n, count, _ in seen} == {(2**28, 3)}
    assert {columns for *_, columns in seen} == {1024, 4096, 16384, 32768}


def test_sizes_follow_the_width_and_the_memory(monkeypatch):
    def shapes(*arguments):
        x, *others = peer_cases.random_tensors(*arguments)
        assert all(other.shape == x.shape and other.dtype == x.dtype for other in others)
        return len(others) + 1, tuple(x.shape)

    monkeypatch.setattr(peer_cases, "free_bytes", lambda: 8 * 3 * 5000)  # 2^12 elements of each
    assert shapes(torch.bfloat16, 2**28, 2) == (2, (4096,))
    assert shapes(torch.float32, 1000, 2, 100) == (2, (10, 100))
    assert shapes(torch.float32, 2**28, 2, 100) == (2, (40, 100))
    assert shapes(torch.float32, 2**28, 2, 10007) == (2, (1, 10007))  # never none


@pytest.mark.parametrize(
    "row, seen", [(0, True), (4, True), (5, True), (7, True), (3, "not all of the output")]
)
def test_rows_that_the_check_of_softmax_looks_at(few_rows, no_liger, monkeypatch, row, seen):
    """Values in some of the 8 rows, and in all that they were written."""
    wrong = torch.nan if isinstance(seen, str) else 0.0

    def launch(x, y):
        y.copy_(torch.softmax(x, dim=-1))
        y[row] = wrong

    monkeypatch.setattr(softmax, "launch_triton_softmax", launch)
    for one in softmax_cases(monkeypatch, 1024):
        with pytest.raises(AssertionError, match=seen if wrong else "relative error"):
            one.check(one.ours)


def test_softmax_backward_cases_are_right_and_their_check_sees_what_is_not(
    few_rows, times, monkeypatch
):
    cases = list(peers.OPERATIONS["triton_softmax_backward"]())
    assert [(one.dtype, one.shape) for one in cases[:3]] == [
        *(("float32", "8x1024"), ("bfloat16", "8x1024"), ("float32", "2x4096"))
    ]
    launch = softmax.launch_triton_softmax_backward
    swapped = lambda y, grad, dx: launch(grad, y, dx)  # noqa: E731
    for one in cases:
        for run in (one.ours, one.peers["pytorch"]):
            one.check(run)
        for wrong in (one.ceiling[1], lambda: None):
            with pytest.raises(AssertionError):
                one.check(wrong)
        assert peers.compare(one)[1] == ""
    monkeypatch.setattr(softmax, "launch_triton_softmax_backward", swapped)
    for one in softmax_peers.triton_softmax_backward_cases():
        with pytest.raises(AssertionError, match="relative error"):
            one.check(one.ours)


def test_ligers_function_is_taken_where_it_is_and_may_return_its_result(
    few_rows, times, monkeypatch
):
    """A right and a wrong stand-in for liger_kernel.transformers.functional, then none."""

    def compared(function) -> tuple[list[dict], str]:
        names = (
            "liger_kernel",
            "liger_kernel.transformers",
            "liger_kernel.transformers.functional",
        )
        for name in names:
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(liger_softmax=function))
        if function is None:
            monkeypatch.setitem(sys.modules, names[-1], None)  # as where it is not installed
        softmax_peers._liger.cache_clear()
        one, _ = softmax_cases(monkeypatch, 512)
        return peers.compare(one)

    try:
        rows, left_out = compared(lambda x: torch.softmax(x, dim=-1))
        assert "liger" in {row["peer"] for row in rows} and "liger" not in left_out
        assert "liger left out: relative error" in compared(lambda x: x.softmax(-1) * 1.01)[1]
        rows, left_out = compared(None)
        assert "liger" not in {row["peer"] for row in rows} and "liger left out" in left_out
    finally:
        softmax_peers._liger.cache_clear()


@pytest.mark.skipif(not triton_version(), reason="needs Triton")
def test_the_lectures_kernel_takes_one_row_a_program(few_rows, no_liger, monkeypatch):
    """At 512 columns too, where ours takes two."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: grids.append((grid, arguments[6:], options))

    monkeypatch.setattr(softmax, "softmax_rows_kernel", Kernel())
    one = softmax_cases(monkeypatch, 512)[0]
    one.peers["lecture"]()
    assert grids == [((16,), (1, 512, 1), {})]
    one.ours()
    assert grids[1][0] == (8,)


def test_softmax_references():
    table = results.softmax_references()
    assert set(table["kernel"]) == {"quack", "liger", "two-pass Triton"}
    assert set(table["dtype"]) == {"float32", "bfloat16"}
    assert not table.isna().any(axis=None)
    assert not table.duplicated(["kernel", "dtype", "shape"]).any()
    assert (table[["ms", "copy_ms"]] > 0).all(axis=None)
    assert (table.groupby(["dtype", "shape"])["copy_ms"].nunique() == 1).all()  # one run each
    itemsize = table["dtype"].map({"float32": 4, "bfloat16": 2})
    gb_per_s = 2 * table["rows"] * table["columns"] * itemsize / table["copy_ms"] / 1e6
    assert gb_per_s.between(1900, 4900).all()  # small tensors copy slower; no H200 is faster
    assert table["fraction_of_copy"].between(0.5, 1.02).all()
