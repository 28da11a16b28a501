"""The virtual device's clock, against times worked out by hand."""

import pytest

from helpers.virtual_device import Span, VirtualDevice


def microseconds(gpu: VirtualDevice) -> float:
    return gpu.time() * 1e6


def test_launch_returns_before_the_kernel_is_done():
    gpu = VirtualDevice(launch_us=5, first_call_us=100)
    gpu.launch("k", 50)
    assert microseconds(gpu) == pytest.approx(105)  # compiled and launched
    gpu.launch("k", 50)
    assert microseconds(gpu) == pytest.approx(110)  # known by now
    gpu.synchronize()
    assert microseconds(gpu) == pytest.approx(105 + 50 + 50)
    gpu.synchronize()
    assert microseconds(gpu) == pytest.approx(205)  # nothing left to wait for


def test_a_slow_host_leaves_gaps():
    gpu = VirtualDevice(launch_us=5, first_call_us=0)
    gpu.launch("k", 2)
    gpu.work_on_host("python", 20)
    gpu.launch("k", 2)
    device = [span for span in gpu.spans if span.lane == "device"]
    assert device == [Span("device", "k", 5, 7), Span("device", "k", 30, 32)]


def test_the_host_blocks_when_the_queue_is_full():
    gpu = VirtualDevice(launch_us=1, first_call_us=0, queue_depth=2)
    for _ in range(3):
        gpu.launch("k", 100)
    # The third launch waits until the first kernel, which ended at 1 + 100, has left the queue.
    assert microseconds(gpu) == pytest.approx(102)
    assert Span("host", "queue full", 2, 101) in gpu.spans


def test_lanes_never_overlap_and_kernels_start_after_their_launch():
    gpu = VirtualDevice(launch_us=3, jitter=0.3, seed=7)
    for i in range(50):
        gpu.launch(f"k{i % 4}", 1 + i % 7)
    gpu.synchronize()
    for lane in ("host", "device"):
        spans = [span for span in gpu.spans if span.lane == lane]
        assert all(a.end_us <= b.start_us for a, b in zip(spans, spans[1:], strict=False))
    launches = [s.end_us for s in gpu.spans if s.name.startswith("launch")]
    starts = [s.start_us for s in gpu.spans if s.lane == "device"]
    assert all(launch <= start for launch, start in zip(launches, starts, strict=True))


def test_jitter_is_seeded():
    def end(seed):
        gpu = VirtualDevice(jitter=0.2, seed=seed)
        for _ in range(10):
            gpu.launch("k", 100)
        gpu.synchronize()
        return gpu.time()

    assert end(1) == end(1) != end(2)


@pytest.mark.parametrize(
    "bad", [lambda: VirtualDevice(queue_depth=0), lambda: VirtualDevice().launch("k", -1)]
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError):
        bad()
