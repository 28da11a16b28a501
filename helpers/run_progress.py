"""How far a run of the notebooks is."""

import contextlib
import sys

from tqdm import tqdm


class Progress:
    """A bar over the cells of all notebooks; where no terminal shows it, a line per notebook."""

    def __init__(self, cells: int):
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=cells, unit="cell", disable=not self.terminal, dynamic_ncols=True)
        self.done = {}  # cells, by notebook

    def line(self, text: str) -> None:
        if not self.terminal:
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(text, file=sys.stderr, flush=True)

    def cells(self, stem: str, done: int, text: str = "") -> None:
        self.done[stem] = done
        self.bar.set_description_str(f"{stem} {text[:40]}", refresh=False)
        self.bar.n = sum(self.done.values())
        with contextlib.suppress(OSError):
            self.bar.refresh()
