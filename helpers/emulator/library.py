"""The runtime's structs (runtime.h), and calling it so that Ctrl-C and a time limit work."""

import ctypes
import functools
import signal
import threading
import time
from pathlib import Path

from helpers import cache

I32, U32, I64, U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64


def _struct(name: str, **fields) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Fault = _struct(
    "Fault",
    **dict.fromkeys(("kind", "line", "other_line"), I32),
    block=U32 * 3,
    **dict.fromkeys(("thread", "other_thread", "count", "other_count", "mask", "access"), U32),
    **dict.fromkeys(("address", "bytes", "pc"), U64),
    index=I64,
    type=ctypes.c_char * 64,
)
Buffer = _struct("Buffer", begin=U64, end=U64, written=U64)
Site = _struct(
    "Site",
    **dict.fromkeys("pc kind size threads requests sectors lines bank_conflicts".split(), U64),
)
Access = _struct(
    "Access", pc=U64, address=U64, **dict.fromkeys(("block", "thread", "kind", "size"), U32)
)
Launch = _struct(
    "Launch",
    grid=U32 * 3,
    block=U32 * 3,
    arguments=ctypes.POINTER(ctypes.c_void_p),
    buffers=ctypes.POINTER(Buffer),
    buffer_count=U64,
    shared_bytes=U64,
    order=I64,
    count_branches=U64,
    trace_capacity=U64,
    trace=ctypes.POINTER(Access),
    **dict.fromkeys("trace_count site_count barriers shuffles".split(), U64),
    **dict.fromkeys("blocks_executed blocks_issued".split(), U64),
    **dict.fromkeys("image static_shared dynamic_shared static_shared_bytes".split(), U64),
    sites=ctypes.POINTER(Site),
    fault=Fault,
)
_Parameter = _struct("Parameter", bytes=U64, is_pointer=U64, is_floating=U64)
_Parameters = _struct("Parameters", count=U64, of=_Parameter * 64)

KINDS = ("load", "store", "atomic", "shared load", "shared store", "shared atomic")
_ALONE = threading.Lock()  # the runtime's state is its library's


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The shared library, with its `parameters` read; OSError for one that cannot be loaded."""
    if not cache.is_whole(path):
        raise OSError(f"{path.name} is not a whole library")
    library = ctypes.CDLL(str(path))
    found = _Parameters.in_dll(library, "emulator_parameters")
    library.emulator_static_shared_bytes.restype = U64
    library.static_shared_bytes = library.emulator_static_shared_bytes()
    library.parameters = found.of[: found.count]
    return library


def call(library: ctypes.CDLL, launch: ctypes.Structure, timeout_s: float) -> None:
    """Run the launch on a thread of its own: this one stays free for Ctrl-C and the clock.

    Afterwards `launch` holds copies of its results: the library's own are the next launch's.
    """
    stop = I32.in_dll(library, "emulator_stop")
    done = threading.Event()

    def work():
        library.emulator_run(ctypes.byref(launch))
        done.set()

    with _ALONE:
        stop.value = 0
        worker = threading.Thread(target=work, daemon=True)
        deadline = time.monotonic() + timeout_s
        worker.start()
        try:
            while not done.wait(max(0.0, min(0.2, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    break
        finally:
            stop.value = 1  # a kernel that has ended does not see it
            while not done.wait(0.5):
                signal.pthread_kill(worker.ident, signal.SIGURG)
        sites = (Site * max(1, launch.site_count))()
        if launch.site_count:
            ctypes.memmove(sites, launch.sites, ctypes.sizeof(Site) * launch.site_count)
        launch.sites = sites
