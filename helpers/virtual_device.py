"""A GPU with a host in front of it, in virtual time: what a timer sees, exactly and anywhere.

The host queues kernels and goes on; the device works the queue off in order. The host's clock
advances only when something is done, so that every reading is reproducible, on every machine.
"""

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Span:
    """What one lane ("host" or "device") did from `start_us` to `end_us`."""

    lane: str
    name: str
    start_us: float
    end_us: float


class VirtualDevice:
    """An asynchronous device, its launch queue and the clock of the host that feeds it.

    launch_us: what one launch costs the host.
    first_call_us: what the first launch of each kernel costs on top (compilation, loading).
    queue_depth: launches that may wait; the host blocks when the queue is full.
    jitter: standard deviation of a kernel's duration, relative; seeded.
    """

    def __init__(
        self,
        launch_us: float = 5,
        first_call_us: float = 40_000,
        queue_depth: int = 1024,
        jitter: float = 0,
        seed: int = 0,
    ):
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, not {queue_depth}")
        if not (launch_us >= 0 and first_call_us >= 0 and jitter >= 0):
            raise ValueError("launch_us, first_call_us and jitter must not be negative")
        self.launch_us, self.first_call_us = launch_us, first_call_us
        self.queue_depth, self.jitter = queue_depth, jitter
        self.spans: list[Span] = []
        self.read_while_busy: list[bool] = []  # of each look at the clock: was a kernel unfinished?
        self._host_us = 0.0
        self._finished_us: list[float] = []  # when each kernel launched so far is done
        self._known: set[str] = set()
        self._random = random.Random(seed)

    def time(self) -> float:
        """The host's clock in seconds, as time.perf_counter()."""
        self.read_while_busy.append(
            bool(self._finished_us) and self._finished_us[-1] > self._host_us
        )
        return self._host_us / 1e6

    def launch(self, name: str, duration_us: float) -> None:
        """Queue a kernel and return at once, as a CUDA launch does."""
        if not duration_us >= 0:
            raise ValueError(f"duration_us must not be negative: {duration_us}")
        if len(self._finished_us) >= self.queue_depth:
            self._wait_until(self._finished_us[-self.queue_depth], "queue full")
        if name not in self._known:
            self._known.add(name)
            if self.first_call_us:
                self._host("compile " + name, self.first_call_us)
        self._host("launch " + name, self.launch_us)
        start_us = max(self._host_us, self._finished_us[-1] if self._finished_us else 0)
        duration_us *= max(0.5, self._random.gauss(1, self.jitter))
        self._finished_us.append(start_us + duration_us)
        self.spans.append(Span("device", name, start_us, start_us + duration_us))

    def work_on_host(self, name: str, duration_us: float) -> None:
        """Something that only the host does, such as Python between two launches."""
        if not duration_us >= 0:
            raise ValueError(f"duration_us must not be negative: {duration_us}")
        self._host(name, duration_us)

    def synchronize(self) -> None:
        """Let the host wait until the queue is empty, as torch.cuda.synchronize()."""
        if self._finished_us:
            self._wait_until(self._finished_us[-1], "synchronize")

    def _host(self, name: str, duration_us: float) -> None:
        start_us = self._host_us
        self._host_us += duration_us
        self.spans.append(Span("host", name, start_us, self._host_us))

    def _wait_until(self, until_us: float, name: str) -> None:
        if until_us > self._host_us:
            self._host(name, until_us - self._host_us)
