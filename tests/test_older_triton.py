"""What is compiled offline, once more under the Triton of the recorded runs.

All for the GPU of those runs, a sample for the others: the newest Triton compiles all for all.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.device import triton_version

ROOT = Path(__file__).resolve().parent.parent
OLDER = "3.6.0"
FOLDER = ROOT / f".triton-{OLDER}"  # `make test` puts it there
FILES = ("tests/test_offline_triton.py", "tests/test_ptx_layouts.py")
RUN = f"""
import importlib.metadata, sys
assert importlib.metadata.version("triton") == "{OLDER}"
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""


@pytest.mark.skipif(triton_version() == OLDER, reason=f"all tests run under Triton {OLDER}")
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no Triton {OLDER} here: make {FOLDER.name}")
def test_the_same_under_an_older_triton():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["SAMPLE_ONLY"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", RUN, *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
