"""Whatever happens to a run, what is finished is kept: a dozen faults here, a hundred by
`make test-faults`.

In case of failure: `python tests/faults.py --shrink SEED`.
"""

import json
import os
import sys

import faults
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the faults are signals")
SEEDS = range(7)  # 16 faults each
DOZEN = 5  # the seed of a few quick ones


def lost(plan: dict, tmp_path, **options: bool) -> str:
    reason = faults.failure(plan, tmp_path / "whole", **options)
    if reason:
        smaller = faults.shrink(plan, tmp_path, seconds=120)
        reason = f"{reason}\n\nin {json.dumps(plan)}\n\nand in {json.dumps(smaller)}"
    return reason


def test_a_dozen_faults(tmp_path):
    plan = faults.make_plan(DOZEN, notebooks=4, rounds=1, harm=9)
    assert faults.count(plan) == 12
    assert not lost(plan, tmp_path)


def test_all_kinds_are_among_the_hundred():
    plans = [faults.make_plan(seed) for seed in SEEDS]
    assert sum(map(faults.count, plans)) >= 100
    rounds = [each for plan in plans for each in plan["rounds"]]
    assert {cell for each in rounds for cell in each["cells"].values()} == {*faults.CELLS}
    assert {what for each in rounds for what, *_ in each["outside"]} == {*faults.OUTSIDE}
    assert {how for each in rounds for _, how in each["damages"]} == {*faults.DAMAGES}


@pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hundred_faults(seed, tmp_path):
    assert not lost(faults.make_plan(seed), tmp_path, recorder=True)
