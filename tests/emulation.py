"""Whether CUDA kernels can be emulated on this machine."""

import functools

import pytest

from helpers.emulator import Unsupported, build


@functools.cache
def missing() -> str:
    """What the emulator lacks here, in a sentence; "" when it works."""
    try:
        build._compiler()
    except Unsupported as reason:
        return str(reason)
    return ""


needs_emulator = pytest.mark.skipif(bool(missing()), reason=missing())
