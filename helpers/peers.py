"""Our kernels against their peers: `python -m helpers.peers [OPERATION ...]`, on a GPU.

Everything of one operation is timed in one interleaved run: L2 cold, outputs allocated before,
the median of all rounds. So is its ceiling: for matmul cuBLAS, for attention cuDNN, else a copy
or an addition that moves the same bytes. The table goes to data/measurements/peers_<device>.csv;
ratios are of speeds, 1 means equal.
"""

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from helpers import (
    attention_backward_peers,
    attention_peers,
    matmul_peers,
    peer_cases,
    results,
    softmax_peers,
)
from helpers import device as machine
from helpers.bench import in_turn
from helpers.peer_cases import Case

OPERATIONS = (
    peer_cases.OPERATIONS
    | softmax_peers.OPERATIONS
    | matmul_peers.OPERATIONS
    | attention_peers.OPERATIONS
    | attention_backward_peers.OPERATIONS
)
COLUMNS = (
    "operation dtype shape ours_ms peer peer_ms ceiling_ms ratio_to_best_peer fraction_of_ceiling "
    "versions date"
).split()
ROUNDS = 5


def compare(case: Case, rounds: int = ROUNDS, budget_ms: float = 15) -> tuple[list[dict], str]:
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
            left_out.append(f"{case.operation} {case.dtype} {case.shape}: {name} left out: {why}")
    ceiling_name, ceiling = case.ceiling
    timed = {("ours", ""): case.ours, ("ceiling", ceiling_name): ceiling}
    timed |= {("peer", name): run for name, run in runs.items()}
    ms = in_turn(timed, rounds, budget_ms)
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

    failed = 0
    for operation in options.operations or OPERATIONS:
        rows = []
        for case in tqdm(OPERATIONS[operation](), desc=operation, unit="case", disable=None):
            try:
                found, left_out = compare(case)
            except Exception as error:  # the other rows are not lost
                failed = 1
                print(
                    f"{operation} {case.dtype} {case.shape}: ours failed: {error}", file=sys.stderr
                )
                continue
            rows += found
            if left_out:
                print(left_out, file=sys.stderr)
        if rows:
            keep(rows, options.output or path())
            frame = pd.DataFrame(rows, columns=COLUMNS).drop(columns=["versions", "date"])
            print(frame.to_string(), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
