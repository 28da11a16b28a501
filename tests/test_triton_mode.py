"""Triton in the mode of this machine, and what stands in where there is none."""

import subprocess
import sys

import pytest
import torch

from helpers import triton_mode
from helpers.device import device, has_cuda
from helpers.kernels import gelu

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from helpers import cuda, memory_roofs  # has a kernel, too
from helpers.kernels import gelu
from helpers.ptx.triton_source import gather
from helpers.triton_mode import tl, triton

@triton.jit(noinline=True)
def kernel(x_ptr, n: tl.constexpr):
    tl.store(x_ptr, n)

@triton.autotune([triton.Config({"n": 1})], key=[])
@triton.jit
def tuned(x_ptr, n: tl.constexpr):
    tl.store(x_ptr, n)

x = torch.ones(3)
for run in (lambda: kernel[(1,)](x, 3), lambda: tuned[(1,)](x), lambda: gelu.triton_gelu(x)):
    with cuda.where_possible():
        run()
try:
    gather(kernel, {}, {})
except TypeError as error:
    print(str(error).split(",")[0])
print(gelu.triton_gelu(x[:0]).shape, gelu.pytorch_gelu(x).sum().item() > 2)
"""


@pytest.mark.case("E20")
def test_without_triton_kernels_are_defined_and_launches_say_why_not():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = f"Left out here: {triton_mode.MISSING}."
    no_kernel = "a kernel is a @triton.jit function or a text"
    assert done.stdout.splitlines() == [said] * 3 + [no_kernel, "torch.Size([0]) True"]


def test_a_tensor_that_the_mode_cannot_reach():
    elsewhere = torch.ones(3, device="cpu" if has_cuda() else "meta")
    with pytest.raises(ValueError, match="take (cuda|cpu) tensors, not (cpu|meta)"):
        gelu.triton_gelu(elsewhere)


def test_interpreted_kernels_warn_of_no_overflow(recwarn):
    gelu.triton_gelu(torch.tensor([1e38, -1e38], device=device()))
    assert not recwarn.list


@pytest.mark.case("E03")
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_a_gpu_machine_can_interpret_too():
    """Case E03: then kernels take CPU tensors, and those of a GPU are refused."""
    script = (
        "import torch; from helpers.kernels.gelu import triton_gelu;"
        "print(triton_gelu(torch.ones(1)).item());"
        "triton_gelu(torch.ones(1, device='cuda'))"
    )
    done = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stdout.startswith("0.841")
    assert "ValueError: Triton kernels are interpreted" in done.stderr
