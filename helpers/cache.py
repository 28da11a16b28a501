"""Where compiled things are kept between runs: one folder of the project, never shared by users."""

import contextlib
import errno
import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where other programs keep what they write to the home folder by default.
IN_HOME = {"TRITON_CACHE_DIR": "triton", "MPLCONFIGDIR": "matplotlib", "IPYTHONDIR": "ipython"}


def folder(kind: str) -> Path:
    """A folder for one kind of file ("emulator", "ptx"), made when missing.

    LECTURES_CACHE names its parent; by default runs/cache in the project, which git ignores, or
    where that cannot be written the user's own folder among the temporary files.
    """
    return next(_folders(kind))


def _folders(kind: str) -> Iterator[Path]:
    return writable(kind, os.environ.get("LECTURES_CACHE"), ROOT / "runs" / "cache")


def writable(kind: str, *parents: str | os.PathLike | None) -> Iterator[Path]:
    """The folder `kind`, made when missing, in each of the parents in which it can be written.

    The last one is the user's own folder among the temporary files. OSError when there is none.
    """
    own = Path(tempfile.gettempdir()) / f"gpu-lectures-{_user()}"
    parents, found = [*filter(None, parents), own], False
    for parent in parents:
        path = Path(parent) / kind
        try:
            path.parent.mkdir(mode=0o700 if parent == own else 0o777, parents=True, exist_ok=True)
            path.mkdir(exist_ok=True)
            # Among the temporary files anybody may have made it, and code is loaded from it.
            foreign = hasattr(os, "getuid") and path.parent.stat().st_uid != os.getuid()
        except OSError:
            continue
        if os.access(path, os.W_OK) and not (foreign and parent == own):
            found = True
            yield path
    if not found:
        raise OSError(f"none of these folders can be written: {', '.join(map(str, parents))}")


def leave_home() -> None:
    """Where the home folder cannot be written, have other programs write among our own files.

    Without it Triton fails at its first kernel on a GPU, and others warn in every notebook.
    """
    with contextlib.suppress(RuntimeError, OSError):  # no home known; no place to write at all
        if os.access(Path.home(), os.W_OK):
            return
        for variable, kind in IN_HOME.items():
            if variable not in os.environ:
                os.environ[variable] = str(folder(kind))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may run a user id without a name
        return str(os.getuid())


def is_whole(library: Path) -> bool:
    """False for a shared library (64-bit ELF) that was cut off: to load it would kill the process.

    Its last part is the table of its sections, whose place its head tells.
    """
    with library.open("rb") as file:
        head = file.read(64)
    begin, size, number = (
        int.from_bytes(head[first:last], "little") for first, last in ((40, 48), (58, 60), (60, 62))
    )
    whole = len(head) == 64 and head[:4] == b"\x7fELF"
    return whole and begin + size * number <= library.stat().st_size


def key(*parts: str) -> str:
    """A name for a file that depends on all of the texts: 20 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def file(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file `name` of that kind; `make(path)` writes it when it is missing.

    `name` says all that the contents depend on (a `key`). Two processes may make it at once: each
    writes a file of its own and moves it into place whole. Where the disk is full, it is made in
    the next folder that can be written.
    """
    full = None
    for place in _folders(kind):
        if (path := place / name).exists():
            return path
        try:
            with tempfile.TemporaryDirectory(dir=place, prefix=".") as private:
                partial = Path(private) / name
                make(partial)
                os.replace(partial, path)
            return path
        except OSError as error:
            if not is_full(error):
                raise
            full = error
    raise full


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
