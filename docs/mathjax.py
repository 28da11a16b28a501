"""MathJax for the site, from the npm registry, once: later builds find it on disk."""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

# Version 4 takes its fonts from another host; this one has them inside.
PACKAGE = "mathjax@3.2.2"
SHA256 = "1b9c0a1c44df864e915690558e72adb9cc5203360daefd385084ced3b6c64c09"
# One file with TeX input and HTML output, what it loads by name, and its fonts.
NEEDED = ("LICENSE", "es5/tex-chtml.js", "es5/input/tex/extensions/", "es5/output/chtml/fonts/")


def fetch(folder: Path) -> Path:
    """The folder that holds `mathjax/es5/tex-chtml.js`, in `folder`; downloaded if it is not there.

    Raises SystemExit, with a sentence, when there is neither a copy nor a way to get one.
    """
    place = folder / PACKAGE
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpacked = Path(scratch, "unpacked")
            _unpack(_download(Path(scratch)), unpacked / "mathjax")
            unpacked.rename(place)
    return place


def _download(folder: Path) -> Path:
    missing = f"The site's formulas need MathJax, which is not in build/{PACKAGE}: "
    if not (npm := shutil.which("npm")):
        raise SystemExit(missing + "install npm (Node.js), which downloads it once.")
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise SystemExit(missing + f"`npm pack {PACKAGE}` could not get it ({reason}).")
    (archive,) = folder.glob("*.tgz")
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(missing + f"npm's {archive.name} has the SHA-256 {found}, not {SHA256}.")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.removeprefix("package/")
            if member.isfile() and name.startswith(NEEDED):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.extractfile(member).read())
