"""Where compiled things are kept between runs: one folder of the project, never shared by users."""

import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from helpers.results import ROOT


def folder(kind: str) -> Path:
    """A folder for one kind of file ("emulator", "ptx"), made when missing.

    LECTURES_CACHE names its parent; by default runs/cache in the project, which git ignores, or
    where that cannot be written the user's own folder among the temporary files.
    """
    own = Path(tempfile.gettempdir()) / f"gpu-lectures-{_user()}"
    parents = [os.environ.get("LECTURES_CACHE"), ROOT / "runs" / "cache", own]
    for parent in filter(None, parents):
        path = Path(parent) / kind
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(path, os.W_OK):
            return path
    raise OSError(f"none of these folders can be written: {', '.join(map(str, parents))}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may run a user id without a name
        return str(os.getuid())


def key(*parts: str) -> str:
    """A name for a file that depends on all of the texts: 20 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def file(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file `name` of that kind; `make(path)` writes it when it is missing.

    `name` says all that the contents depend on (a `key`). Two processes may make it at once: each
    writes a file of its own and moves it into place whole.
    """
    path = folder(kind) / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as private:
            partial = Path(private) / name
            make(partial)
            os.replace(partial, path)
    return path
