"""What can go wrong with a kernel, each as one sentence."""


class Unsupported(RuntimeError):
    """This machine or the emulator cannot run the kernel, though a GPU may."""


class CompileError(RuntimeError):
    """The text is no valid CUDA C++: g++'s first errors, by the kernel's own lines."""


class KernelFault(RuntimeError):
    """A kernel did what a GPU forbids or leaves undefined. The tensors are as before the launch.

    kind: "out of bounds", "misaligned access", "barrier", "warp operation", "shared-memory race",
    "timeout", "division by zero", "stack overflow", "trap" (a failed assert too) or "crash".
    block and thread: (x, y, z).
    """

    def __init__(self, message: str, *, kernel: str, block: tuple, thread: tuple, kind: str):
        super().__init__(message)
        self.kernel, self.block, self.thread, self.kind = kernel, block, thread, kind
