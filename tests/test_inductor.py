"""The sources that TorchInductor writes, found again and run."""

import re

import pytest
import torch

from helpers import compute_roofs, inductor
from helpers.check import assert_close
from helpers.device import device, has_cuda

pytestmark = pytest.mark.skipif(
    not compute_roofs.can_compile(), reason=compute_roofs.compiler_missing()
)


def test_one_kernel_with_its_operations_in_its_name():
    compiled = compute_roofs.compiled(lambda x: torch.sin(x) * 2)
    x = torch.randn(64, device=device())
    for _ in range(2):  # the second time all caches are warm
        result, found = inductor.kernels(compiled, x)
        assert_close(result, torch.sin(x.double()) * 2)
        ((name, source),) = found.items()
        language = "triton_poi" if has_cuda() else "cpp"
        assert re.fullmatch(rf"{language}_fused_mul_sin_\d", name)
        assert source.startswith("@triton.jit" if has_cuda() else 'extern "C"')
        assert "sin" in source and "'''" not in source
    assert inductor.kernels(lambda x: x + 1, x)[1] == {}  # nothing is compiled
