"""What several test files need."""

import dataclasses
import functools
import gc
import inspect
import sys

import emulation
import pytest
import torch

from helpers import native
from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.emulator import Unsupported
from helpers.ptx import ToolMissing
from helpers.triton_mode import MISSING


def pytest_collection_finish():
    # Thousands of tests and all of PyTorch are there to stay: looking through them for garbage
    # again and again takes up to a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and interpreting():
        remember_builtins(interpreter)
        remember_types(interpreter)
        remember_functions(interpreter)
        leave_out_what_is_discarded(interpreter)


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

    dtype, semantic = interpreter.tl.dtype, interpreter.TritonSemantic
    equals, broadcast = dtype.__eq__, semantic.broadcast_impl_value
    dtype.__eq__ = lambda self, other: self is other or equals(self, other)

    def broadcast_impl_value(self, lhs, rhs):
        blocks = isinstance(lhs.type, block_type) and isinstance(rhs.type, block_type)
        if blocks and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def remember_functions(interpreter) -> None:
    """Triton's interpreter patches triton.language once more whenever a kernel calls a function,
    and parses a function anew for each copy of it, as mutants of a kernel are. Here a call leaves
    what is in place, and equal texts are parsed once. Nothing else that it does changes.
    """
    tl, function = interpreter.tl, interpreter.InterpretedFunction
    rewriter, own_range = interpreter.FunctionRewriter, tl.range
    transform, trees = rewriter._transform_ast, {}

    @functools.cache
    def languages(fn) -> list:
        return [lang for lang in (tl, tl.core) if any(v is lang for v in fn.__globals__.values())]

    def call(self, *args, **kwargs):
        used, is_in_place = languages(self.fn), "__index__" in vars(tl.tensor)
        if not used or not is_in_place or any(lang.range is own_range for lang in used):
            interpreter._patch_lang(self.fn)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def transform_ast(self, source):
        if (key := (source, self.def_file_lineno)) not in trees:
            trees[key] = transform(self, source)
        return trees[key]

    function.__call__, rewriter._transform_ast = call, transform_ast


def leave_out_what_is_discarded(interpreter) -> None:
    """Triton's interpreter computes each sum, difference and product of integers a second time, in
    64 bits, to see whether it overflows, and does not look at the answer unless it debugs: a fifth
    of a kernel's time.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """What needs Triton or the emulator is skipped where there is none, as on macOS and Windows."""
    try:
        return (yield)
    except (Unsupported, ToolMissing) as reason:
        if str(reason) not in (emulation.missing(), "" if triton_version() else MISSING):
            raise
        pytest.skip(str(reason))


pytest_runtest_call = pytest_runtest_setup


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
