"""What several test files need."""

import inspect
import sys

import pytest
import torch

from helpers import native
from helpers.device import device, has_cuda, interpreting
from helpers.ptx import ToolMissing


def pytest_collection_finish():
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and interpreting():
        remember_builtins(interpreter)
        remember_types(interpreter)


def remember_builtins(interpreter) -> None:
    """Triton's interpreter looks through all of triton.language before every launch, and whenever a
    kernel calls a function such as tl.sum, for what to put its own versions in place of: a third of
    a small kernel's time. Here it looks once. Nothing else that it does changes.
    """
    tl, is_builtin = interpreter.tl, interpreter.tl.core.is_builtin
    packages = tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base
    names = {p: [n for n, member in inspect.getmembers(p) if is_builtin(member)] for p in packages}

    def patch_builtin(package, builder, scope) -> None:
        if not is_builtin(getattr(package, names[package][0])):
            return  # it is in place: a package is patched, and restored, as a whole
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def remember_types(interpreter) -> None:
    """Triton's interpreter works out anew for each value what its type says of it: its shape, its
    parts, NumPy's type for it. Here it does so once for each type, which saves a quarter of a
    kernel's time. Nothing else that it does changes.
    """
    tensor, block_type = interpreter.tl.tensor, interpreter.tl.block_type
    of_tensor, of_block, np_dtype = tensor.__init__, block_type.__init__, interpreter._get_np_dtype
    tensors, blocks, np_dtypes = {}, {}, {}

    def init_tensor(self, handle, type):
        if type.name not in tensors:
            of_tensor(self, None, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    def init_block_type(self, element_ty, shape):
        if (key := (element_ty.name, *shape)) not in blocks:
            of_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def get_np_dtype(type):
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype(type)
        return np_dtypes[type.name]

    tensor.__init__, block_type.__init__ = init_tensor, init_block_type
    interpreter._get_np_dtype = get_np_dtype


@pytest.fixture
def compiled():
    """Skips a test where the CPU's own kernels cannot be compiled."""
    try:
        native.load()
    except ToolMissing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def memory():
    """Over 2^31 numbers. On a CPU most of that memory is never touched, only reserved."""
    if has_cuda() and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB of GPU memory")
    try:
        return torch.empty(2**31 + 2**20, dtype=torch.float16, device=device())
    except RuntimeError:
        pytest.skip("needs 4 GB of address space")
