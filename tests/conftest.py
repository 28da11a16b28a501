"""What several test files need."""

import pytest

from helpers import native
from helpers.ptx import ToolMissing


@pytest.fixture
def compiled():
    """Skips a test where the CPU's own kernels cannot be compiled."""
    try:
        native.load()
    except ToolMissing as reason:
        pytest.skip(str(reason))
