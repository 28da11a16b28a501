"""One CUDA C++ text, three ways: launched on a GPU, emulated on a CPU, read as PTX.

    add = cuda.Kernel(text, "add")
    add(grid, block, x, y, out, n)         # on the tensors' device: a GPU, or emulated on the CPU
    add.emulate(grid, block, x, y, out, n) # emulated, and returns what the emulator counted
    add.ptx("sm_90")                       # for any GPU, without one

A launch compiles with NVRTC through `cuda.core`, in about 0.05 s the first time.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

from helpers import cache, cuda_source, emulator, ptx

KERNELS = Path(__file__).parent / "kernels"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One `__global__` function of a CUDA C++ text.

    file: what error messages call the text. defines: macros, as (name, value) pairs.
    """

    text: str
    name: str
    file: str = "kernel.cu"
    defines: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        _ = self.parameters  # ValueError, early

    def __call__(self, grid, block, *arguments, shared_bytes: int = 0) -> emulator.Counts | None:
        """Launch on the device of the tensors among the arguments, on its current stream.

        grid, block: blocks and threads, an int or up to three. shared_bytes: dynamic shared memory
        of a block. CPU tensors go through the emulator, and what it counted is returned.
        ValueError for sizes that no GPU takes or tensors on several devices, TypeError for
        arguments that do not fit the parameters.
        """
        grid, block = cuda_source.sizes("grid", grid), cuda_source.sizes("block", block)
        bound = self._bind(arguments)
        devices = {value.device for value in bound.values() if isinstance(value, torch.Tensor)}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"{self.name} needs tensors of one device, and has {found}")
        (device,) = devices
        if device.type == "cpu":
            return self.emulate(grid, block, *arguments, shared_bytes=shared_bytes)
        if device.type != "cuda":
            raise ValueError(f"{self.name} runs on an NVIDIA GPU or a CPU, not on {device}")
        if not torch.version.cuda:
            raise emulator.Unsupported("CUDA runs on NVIDIA's GPUs, and this PyTorch is for AMD's")
        _launch(self, device, grid, block, list(bound.values()), shared_bytes)
        return None

    def emulate(self, grid, block, *arguments, shared_bytes: int = 0, **options) -> emulator.Counts:
        """Run on CPU tensors in the emulator; `options` and the counts: `helpers.emulator.run`."""
        return emulator.run(
            self.text,
            self.name,
            grid,
            block,
            self._bind(arguments),
            shared_bytes=shared_bytes,
            name=self.file,
            defines=dict(self.defines),
            **options,
        )

    @property
    def parameters(self) -> tuple[cuda_source.Parameter, ...]:
        """What the kernel takes, in order."""
        return cuda_source.parameters(self.text, self.name, self.defines)

    @property
    def function(self) -> str:
        """The text of this kernel alone, with the comment above it."""
        return cuda_source.function(self.text, self.name)

    def ptx(self, arch: str = "sm_90") -> str:
        """The PTX of this kernel alone."""
        return ptx.entry(self._whole_ptx(arch), self.name)

    def sass(self, arch: str = "sm_90") -> str:
        """The machine code of this kernel for one generation of GPUs."""
        return ptx.sass(self._whole_ptx(arch), arch, self.name)

    def _whole_ptx(self, arch: str) -> str:
        return ptx.cuda_ptx(self.text, arch, name=self.file, defines=dict(self.defines))

    def _bind(self, arguments) -> dict:
        return cuda_source.bind(self.text, self.name, arguments, self.defines)


@contextlib.contextmanager
def where_possible() -> Iterator[None]:
    """Run a block of a notebook; where a tool for it is missing, say which instead, and go on."""
    try:
        yield
    except (emulator.Unsupported, ptx.ToolMissing) as reason:
        print(f"Left out here: {reason}.")
    except OSError as error:
        if not cache.is_full(error):
            raise
        print(f"Left out here: {error.strerror}.")


def load(file: str, name: str, **defines: str) -> Kernel:
    """A kernel of a .cu file in helpers/kernels; `defines` are macros: scalar="float"."""
    text = (KERNELS / file).read_text(encoding="utf-8")
    return Kernel(text, name, file, tuple(sorted(defines.items())))


def _core():
    try:
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise ptx.ToolMissing(
            f"launching CUDA kernels needs the package cuda-core ({error}): pip install cuda-core"
        ) from error


@functools.lru_cache(maxsize=256)
def _compiled(kernel: Kernel, index: int):
    """The kernel loaded on GPU `index`, and the device as cuda.core sees it."""
    core = _core()
    device = core.Device(index)
    device.set_current()
    options = core.ProgramOptions(
        name=kernel.file,
        arch=f"sm_{device.arch}",
        include_path=[str(path) for path in ptx.cuda_include_paths()],
        define_macro=list(kernel.defines) or None,
    )
    program = core.Program(kernel.text, "c++", options)
    try:
        code = program.compile("cubin", name_expressions=(kernel.name,))
    except Exception:
        # cuda.core quotes its options and all of the log; this raises the first errors alone.
        kernel._whole_ptx(options.arch)
        raise
    return code.get_kernel(kernel.name), device


@functools.lru_cache(maxsize=256)
def _stream(handle: int):
    return _core().Stream.from_handle(handle)


@functools.lru_cache(maxsize=256)
def _config(grid: tuple, block: tuple, shared_bytes: int):
    return _core().LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)


def _launch(kernel, device, grid, block, arguments, shared_bytes) -> None:
    core = _core()
    with torch.cuda.device(device):
        compiled, there = _compiled(kernel, torch.cuda.current_device())
        there.set_current()
        stream = _stream(torch.cuda.current_stream().cuda_stream)
        if shared_bytes:
            _allow_shared(compiled, shared_bytes, device.index)
        config = _config(grid, block, shared_bytes)
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        core.launch(stream, config, compiled, *values)


def _allow_shared(compiled, shared_bytes: int, index: int) -> None:
    """A block gets over 48 KB in all only when the driver is told so; cuda.core has no call."""
    from cuda.bindings import driver

    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(most, shared_bytes, compiled.handle, index)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"this GPU has no {shared_bytes:,} bytes of shared memory for a block")
