"""What a kernel does to memory, against counts worked out by hand."""

import shutil

import pytest
import torch
from emulation import needs_emulator

from tests.test_emulator import floats, run

pytestmark = needs_emulator


@pytest.mark.parametrize(
    "index, sectors, lines",
    [
        ("i", 4, 1),
        ("31 - i", 4, 1),
        ("2 * i", 8, 2),
        ("i + 1", 5, 2),  # misaligned by one float
        ("8 * i", 32, 8),
        ("32 * i", 32, 32),
        ("0 * i", 1, 1),  # one word for all
        ("i / 8", 1, 1),
    ],
)
def test_sectors_of_one_warp(index, sectors, lines):
    counts = run(f"y[i] = x[{index}];", torch.arange(1024.0), torch.zeros(32))
    assert (counts.load_requests, counts.load_sectors, counts.load_lines) == (1, sectors, lines)
    assert counts.sectors_per_load_request == sectors
    assert (counts.store_sectors, counts.store_lines) == (4, 1)


def test_a_view_keeps_the_storage_s_alignment():
    storage = torch.arange(100.0)
    counts = run("y[i] = x[i];", storage[1:33], y := torch.zeros(32))
    assert y.equal(storage[1:33]) and counts.load_sectors == 5


def test_a_float4_is_one_access():
    x, y = floats(128), torch.zeros(128)
    body = "float4 v = ((const float4*)x)[i]; v.x *= 2; v.w += v.y; ((float4*)y)[i] = v;"
    counts = run(body, x, y)
    expected = x.clone().view(-1, 4)
    expected[:, 0] *= 2
    expected[:, 3] += expected[:, 1]
    assert y.equal(expected.flatten())
    assert (counts.loads, counts.load_requests, counts.bytes_read) == (32, 1, 512)
    assert (counts.load_sectors, counts.load_lines, counts.stores) == (16, 4, 32)


@pytest.mark.parametrize("columns, conflicts", [(32, 31), (33, 0), (34, 1), (36, 3)])
def test_bank_conflicts_of_a_column(columns, conflicts):
    body = f"""__shared__ float s[32 * {columns}]; s[i * {columns}] = x[i]; __syncwarp();
    y[i] = s[(31 - i) * {columns}];"""
    counts = run(body, x := floats(32), y := torch.zeros(32))
    assert y.equal(x.flip(0))
    assert counts.bank_conflicts == 2 * conflicts and counts.shared_requests == 2


def test_wide_shared_accesses_take_turns_without_conflicts():
    body = """__shared__ float4 s[32]; s[i] = make_float4(x[i], 0, 0, 0); __syncwarp();
    y[i] = s[31 - i].x;"""
    counts = run(body, x := floats(32), y := torch.zeros(32))
    assert y.equal(x.flip(0))
    # The 16-byte store goes eight lanes at a time; reading one float in four has four on a bank.
    assert {r.kind: r.bank_conflicts for r in counts.by_line if "shared" in r.kind} == {
        "shared store": 0,
        "shared load": 3,
    } or not counts.by_line


@pytest.mark.parametrize("ways", [1, 2, 4, 32])
def test_divergence(ways):
    # Code of its own for each way: blocks are matched by their place in the code.
    cases = "".join(
        f"case {w}: for (int j = 0; j < 200; j++) v = v * {w + 0.5}f + x[{w}]; break;\n"
        for w in range(ways)
    )
    body = f"float v = x[i];\nswitch (i % {ways}) {{ {cases} }}\ny[i] = v;"
    counts = run(body, floats(32), torch.zeros(32), branches=True)
    assert counts.active_lanes == pytest.approx(32 / ways, rel=0.05)
    assert run("y[i] = x[i];", floats(32), torch.zeros(32)).active_lanes is None


def test_diverged_lanes_issue_their_accesses_apart():
    body = "if (i % 2) y[i] = x[i]; else for (int j = 0; j <= i; j += 2) y[i] = x[j];"
    counts = run(body, x := torch.arange(32.0), y := torch.zeros(32))
    assert y.equal(x)
    assert counts.loads == 16 + sum(range(1, 17))
    assert counts.load_requests == 1 + 16  # the longest lane's loop


def test_lines_and_accesses_by_line():
    body = "__shared__ float s[32];\ns[i] = x[i];\n__syncwarp(); y[i] = s[i];"
    counts = run(body, floats(32), torch.zeros(32), trace=True)
    first = [access for access in counts.accesses if access.thread == 5]
    assert [(a.kind, a.parameter, a.byte_offset, a.size) for a in first] == [
        ("load", "x", 20, 4),
        ("shared store", "", 20, 4),
        ("shared load", "", 20, 4),
        ("store", "y", 20, 4),
    ]
    if shutil.which("addr2line"):
        rows = {(r.line, r.kind): r for r in counts.by_line}
        assert set(rows) == {(4, "load"), (4, "shared store"), (5, "shared load"), (5, "store")}
        assert rows[4, "load"][2:] == (1, 32, 128, 4, 1, 0)
        assert [a.line for a in first] == [4, 4, 5, 5]


def test_a_long_loop_is_counted_exactly():
    body = "float sum = 0; for (int j = 0; j < 10000; j++) sum += x[(i + j) % 32]; y[i] = sum;"
    counts = run(body, torch.ones(32), y := torch.zeros(32))
    assert y.tolist() == [10000] * 32
    assert (counts.loads, counts.load_requests, counts.load_sectors) == (320000, 10000, 40000)
