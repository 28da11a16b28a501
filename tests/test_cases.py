"""Every trouble of cases.jsonl is a test, or stands in cases.md with the reason.

A test that has a case's own input carries its id: @pytest.mark.case("N01"). `pytest -m case tests`
runs them.
"""

import ast
import json
import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = [json.loads(x) for x in (TESTS / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
IDS = {case["id"] for case in CASES}
# "- **E14** …: reason", in the section that says what holds of it.
LISTED = re.compile(r"^- \*\*([A-Z]\d\d)\*\*\s+\S", re.MULTILINE)


def marked() -> dict[str, set[str]]:
    """The ids on tests that pytest collects, each with the tests' names, read from the files."""
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for mark in function.decorator_list:
                if not isinstance(mark, ast.Call):
                    continue
                if ast.unparse(mark.func) not in ("case", "pytest.mark.case"):
                    continue
                name = f"{path.name}::{function.name}"
                assert function.name.startswith("test_"), f"{name} is marked, and is no test"
                for each in mark.args:
                    found.setdefault(ast.literal_eval(each), set()).add(name)
    return found


def sections() -> dict[str, list[str]]:
    """The ids that cases.md lists under each of its headings."""
    _, *parts = re.split(r"^## ", (TESTS / "cases.md").read_text(encoding="utf-8"), flags=re.M)
    return {part.splitlines()[0]: LISTED.findall(part) for part in parts}


def test_ids_are_unique():
    assert len(IDS) == len(CASES) == 54
    listed = [each for ids in sections().values() for each in ids]
    assert len(listed) == len({*listed})


def test_every_case_is_a_test_or_has_a_reason():
    found, listed = marked(), sections()
    assert {*listed} == {"Not tested", "Tested in part"}
    assert {*found} <= IDS, "marks that are no case"
    untested, partly = ({*listed[name]} for name in ("Not tested", "Tested in part"))
    assert untested | partly <= IDS
    assert not IDS - {*found} - untested, "neither a test nor a reason"
    assert not untested & {*found}, "tested after all"
    assert partly <= {*found}, "no test of any part"
