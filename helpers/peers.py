"""Our kernels against their peers: `python -m helpers.peers [OPERATION ...]`, on a GPU.

Everything of one operation is timed in one interleaved run: L2 cold, outputs allocated before,
the median of all rounds. So is its ceiling: for GeLU a copy of the same bytes, for fp32 matmul
cuBLAS. The table goes to data/measurements/peers_<device>.csv; ratios are of speeds, 1 means equal.
"""

import argparse
import dataclasses
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from helpers import compute_roofs, results
from helpers import device as machine
from helpers.bench import measure
from helpers.check import assert_close
from helpers.kernels import gelu, matmul
from helpers.memory import free_bytes, largest_power_of_2

COLUMNS = (
    "operation dtype shape ours_ms peer peer_ms ceiling_ms ratio_to_best_peer fraction_of_ceiling "
    "versions date"
).split()
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size: what is timed, each a function without arguments.

    peers: name -> function, or the reason why it is left out. ceiling: name and function of what
    nothing can beat. check: raises AssertionError unless a function's result is right.
    """

    operation: str
    dtype: str
    shape: str
    ours: Callable
    peers: dict[str, Callable | str]
    ceiling: tuple[str, Callable]
    check: Callable[[Callable], None]


@functools.cache
def _compiled_gelu() -> Callable:
    # Made when it is first called: torch.compile refuses Pythons that are newer than it knows.
    return torch.compile(lambda x, y: y.copy_(gelu.manual_gelu(x)))


def gelu_cases() -> Iterator[Case]:
    """`cuda_gelu` beside PyTorch's kernel and torch.compile's, and a copy of the same bytes."""
    n = min(2**28, largest_power_of_2(free_bytes() / 32))  # x and y, of this dtype and the last
    for dtype in gelu.DTYPES:
        x = torch.randn(n, device=machine.device()).to(dtype)
        y = torch.empty_like(x)
        few = slice(0, min(n, 2**20))
        expected = gelu.pytorch_gelu(x[few].double())

        def check(run, y=y, few=few, expected=expected):
            y.fill_(torch.nan)  # what an earlier function wrote must not count
            run()
            assert_close(y[few], expected)
            assert y.isfinite().all(), "not all of the output was written"

        yield Case(
            "cuda_gelu",
            str(dtype).removeprefix("torch."),
            str(n),
            ours=lambda x=x, y=y: gelu.launch_cuda_gelu(x, y),
            peers={
                "pytorch": lambda x=x, y=y: torch.ops.aten.gelu.out(x, approximate="tanh", out=y),
                "torch.compile": compute_roofs.compiler_missing()
                or (lambda x=x, y=y: _compiled_gelu()(x, y)),
            },
            ceiling=("copy", lambda x=x, y=y: y.copy_(x)),
            check=check,
        )


def matmul_cases() -> Iterator[Case]:
    """`cuda_matmul_tiled` in fp32 beside cuBLAS, which torch.mm calls, both without TF32."""
    side = min(4096, largest_power_of_2((free_bytes() / 32) ** 0.5))  # three matrices, and some
    a, b, c = (torch.randn(side, side, device=machine.device()) for _ in range(3))
    rows = slice(None, None, max(1, side // 64))  # some of every tile: all of it in fp64 is slow
    expected = a[rows].double() @ b.double()

    def cublas():
        with compute_roofs.tf32_allowed(False):
            torch.mm(a, b, out=c)

    def check(run):
        c.fill_(torch.nan)  # what an earlier function wrote must not count
        run()
        assert_close(c[rows], expected)
        assert c.isfinite().all(), "not all of the output was written"

    yield Case(
        "cuda_matmul_tiled",
        "float32",
        f"{side}x{side}x{side}",
        ours=lambda: matmul.launch_registers(a, b, c),
        peers={"pytorch": cublas, "torch.compile": "it calls the same kernel of cuBLAS"},
        ceiling=("cuBLAS fp32", cublas),
        check=check,
    )


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "cuda_gelu": gelu_cases,
    "cuda_matmul_tiled": matmul_cases,
}


def compare(case: Case, rounds: int = ROUNDS, budget_ms: float = 30) -> tuple[list[dict], str]:
    """The rows of one case, a peer each, and what was left out ("" when nothing was).

    A peer that fails or computes something else is left out as well; AssertionError when ours does.
    """
    case.check(case.ours)
    runs, left_out = {}, []
    for name, peer in case.peers.items():
        try:
            if isinstance(peer, str):
                raise RuntimeError(peer)
            case.check(peer)
            runs[name] = peer
        except Exception as error:  # a peer's trouble is not ours
            why = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
            left_out.append(f"{case.operation} {case.dtype}: {name} left out: {why}")
    ceiling_name, ceiling = case.ceiling
    timed = {("ours", ""): case.ours, ("ceiling", ceiling_name): ceiling}
    timed |= {("peer", name): run for name, run in runs.items()}
    samples = {key: [] for key in timed}
    for _ in range(rounds):  # in turn: a clock that drifts meets all of them
        for key, run in timed.items():
            samples[key] += measure(run, budget_ms=budget_ms).samples_ms
    ms = {key: torch.tensor(found).quantile(0.5).item() for key, found in samples.items()}
    ours, best = ms["ours", ""], ms["ceiling", ceiling_name]
    fastest = min((ms["peer", name] for name in runs), default=None)
    common = {
        "operation": case.operation,
        "dtype": case.dtype,
        "shape": case.shape,
        "ours_ms": round(ours, 5),
        "ceiling_ms": round(best, 5),
        "ratio_to_best_peer": round(fastest / ours, 4) if fastest else "",
        "fraction_of_ceiling": round(best / ours, 4),
        "versions": f"torch {torch.__version__}, triton {machine.triton_version() or 'none'}",
        "date": datetime.date.today().isoformat(),
    }
    rows = [common | {"peer": name, "peer_ms": round(ms["peer", name], 5)} for name in runs]
    return rows or [common | {"peer": "", "peer_ms": ""}], "\n".join(left_out)


def path() -> Path:
    """The file of this machine's table."""
    return results.measurements_path(f"peers_{machine.slug()}").with_suffix(".csv")


def keep(rows: list[dict], file: Path) -> None:
    """Put rows into a table, in place of those of the same operations; never half a file."""
    import pandas as pd

    new = pd.DataFrame(rows, columns=COLUMNS)
    if file.exists():
        old = pd.read_csv(file)
        new = pd.concat([old[~old["operation"].isin(new["operation"])], new])
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    new.to_csv(partial, index=False)
    os.replace(partial, file)


def main(arguments: list[str] | None = None) -> int:
    """0: written; 1: an operation of ours failed; 2: bad arguments or no GPU."""
    parser = argparse.ArgumentParser(prog="helpers.peers", description=__doc__.split(":")[0] + ".")
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {path().name}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.operations) - set(OPERATIONS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    if not machine.has_cuda():
        print("helpers.peers: there is no GPU here to time kernels on.", file=sys.stderr)
        return 2
    import pandas as pd

    rows, failed = [], 0
    for operation in options.operations or OPERATIONS:
        for case in tqdm(OPERATIONS[operation](), desc=operation, unit="case", disable=None):
            try:
                found, left_out = compare(case)
            except Exception as error:  # the other rows are not lost
                failed = 1
                print(f"{operation} {case.dtype}: ours failed: {error}", file=sys.stderr)
                continue
            rows += found
            if left_out:
                print(left_out, file=sys.stderr)
    if rows:
        keep(rows, options.output or path())
        print(pd.DataFrame(rows, columns=COLUMNS).drop(columns=["versions", "date"]).to_string())
    return failed


if __name__ == "__main__":
    sys.exit(main())
