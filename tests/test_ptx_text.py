"""Counting and explaining PTX and SASS, against snippets counted by hand."""

import re

import pytest

from helpers.ptx import kinds, notes
from helpers.ptx import text as ptx_text

CUDA = """//
.version 9.0
.target sm_90
.address_size 64
.extern .func (.param .b32 result) helper
(
    .param .b32 a
)
;
.visible .entry _Z5naivePfi(
    .param .u64 _Z5naivePfi_param_0,
    .param .u32 _Z5naivePfi_param_1
)
.maxntid 256, 1, 1
{
    .reg .pred  %p<4>;
    .reg .f64   %fd<79>;
    // a comment with add.f32 in it;
    .shared .align 4 .b8 tile[1024];

    ld.param.u64    %rd2, [_Z5naivePfi_param_0];
    ld.param.u32    %r3, [_Z5naivePfi_param_1];
    mov.u32     %r4, %ctaid.x;
    mov.u32     %r5, %ntid.x;
    mov.u32     %r6, %tid.x;
    mad.lo.s32  %r1, %r4, %r5, %r6;
    setp.ge.s32     %p1, %r1, %r3;
    @%p1 bra    $L__BB0_5;

    cvta.to.global.u64  %rd4, %rd2;
    mul.wide.s32    %rd5, %r1, 4;
    add.s64     %rd6, %rd4, %rd5;
    ld.global.f32   %f1, [%rd6];
    cvt.f64.f32     %fd1, %f1;
    mul.f64     %fd7, %fd1, 0d3FE988453365DE00;
    fma.rn.f64  %fd9, %fd7, %fd1, %fd1;
    {
    .reg .b32 %temp;
    mov.b64     {%temp, %r7}, %fd9;
    }
    setp.ltu.f64    %p2, %fd9, 0d3FE4F92224DD2F1A;
    selp.f64    %fd50, 0d3FF0000000000000, %fd9, %p2;
    rcp.approx.ftz.f64  %fd43, %fd50;
    cvt.rn.f32.f64  %f6, %fd43;
    tanh.approx.f32     %f7, %f6;
    mul.f32     %f8, %f7, 0f3F4C422A;
$L__BB0_4:  st.global.f32   [%rd6], %f8;
$L__BB0_5:
    ret;
}
.entry empty()
{
    ret;
}
"""
CUDA_KINDS = {
    "fp64": 3,  # mul, fma, setp
    "fp32": 1,
    "special function": 2,
    "integer": 3,
    "conversion": 3,
    "move": 4,
    "predicate": 2,
    "branch": 2,
    "load global": 1,
    "store global": 1,
    "load constant": 2,
}
TRITON = """.version 8.7
.target sm_90a
.visible .entry mm(
    .param .u64 .ptr .global .align 1 mm_param_0
)
.reqntid 128
{
    .loc    1 14 0                          // t.py:14:0
    // begin inline asm
    mov.u32 %r1, 0x0;
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    // end inline asm
    cp.async.cg.shared.global [ %r12 + 0 ], [ %rd8 + 0 ], 0x10, %r13;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync    0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r284,%r285}, %rd35, %rd36, %p4, 1, 1;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 }, { %r3 }, { %r4 }, { %r5 };
    @%p13 tcgen05.mma.cta_group::1.kind::f16 [ %r177 + 0 ], %rd43, %rd44, %r56, %p12;
    tcgen05.wait::ld.sync.aligned;
    tcgen05.ld.sync.aligned.16x32bx2.x32.b32 {%r111, %r112}, [%r143 + 0], 32;
    {
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [%r330], %r329;
    @!complete bra.uni waitLoop;
    }
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r100, %r101, %r102, %r103}, [%r280];
    st.shared.v4.b32 [ %r80 + 0 ], { %r81, %r82, %r83, %r84 };
    ld.shared.b32 %r5, [%r6];
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r100, %r101, %r102, %r103};
    shfl.sync.bfly.b32 %r10|%p2, %r6, 16, 31, -1;
    elect.sync  %r47|%p5, -1;
    redux.sync.add.s32 %r1, %r2, -1;
    atom.global.add.f32 %f20, [%rd6], %f3;
    red.relaxed.gpu.global.add.f32 [%rd6], %f3;
    add.rn.bf16x2 %r1, %r2, %r3;
    fma.rn.f16 %rs1, %rs2, %rs3, %rs4;
    div.full.f32 %r1, %r2, %r3;
    and.pred %p1, %p2, %p3;
    xor.b32 %r1, %r2, %r3;
    call.uni (retval0),
    helper,
    (
    param0
    );
    st.local.b32 [%rd1], %r1;
    st.param.b32 [param0], %r1;
    ld.b32 %r1, [%rd1];
    st.global.v2.b64 [%rd1], {%rd2, %rd3};
    prefetch.global.L2 [%rd1];
    nanosleep.u32 20;
    ret;
}
"""
TRITON_KINDS = {
    "tensor core": 3,
    "fp32": 1,
    "fp16/bf16": 2,
    "integer": 1,
    "move": 1,
    "predicate": 1,
    "branch": 3,
    "load global": 1,
    "store global": 1,
    "load shared": 2,
    "store shared": 2,
    "async copy": 1,
    "store local": 1,
    "load generic": 1,
    "store parameter": 1,
    "tensor memory": 1,
    "atomic": 2,
    "shuffle": 1,
    "warp vote/reduce": 2,
    "barrier": 6,
    "cache hint": 1,
    "other": 1,
}
SASS = """0000         LDC R1, c[0x0][0x28]
0010         S2R R2, SR_CTAID.X
0030         IMAD.MOV.U32 R0, RZ, RZ, RZ
0060         IMAD R2, R2, UR4, R11
0080         ISETP.GE.AND P1, PT, R2, UR4, PT
00b0  @!P1   LDG.E.128 R0, desc[UR6][R4.64]
00c0  @UP0   UIADD3 UR5, UR4, 0x1, URZ
00d0         HFMA2.MMA R5, -RZ, RZ, 0, 0
00d8         HFMA2 R5, R6, R7, R8
00e0         HMMA.16816.F32.BF16 R4, R8, R12, R4
00f0         DFMA R10, R8, R10, c[0x2][0x70]
0100         F2F.F64.F32 R2, R2
0110         MUFU.RCP64H R3, R5
0118         MUFU.EX2 R3, R5
0120         DSETP.MAX.AND P0, P1, R2, R4, PT
0130         BSSY B0, .L_x_0
0140  @P0    BRA .L_x_0
.L_x_0:
0150         BSYNC B0
0160         STG.E.U16 [R4], R3
0170         LDGSTS.E.BYPASS.128 [R5], desc[UR6][R4.64]
0180         EXIT
"""
SASS_KINDS = {
    "tensor core": 1,
    "fp64": 2,
    "fp16/bf16": 1,
    "special function": 2,
    "integer": 2,
    "conversion": 1,
    "move": 3,
    "predicate": 1,
    "branch": 4,
    "load global": 1,
    "store global": 1,
    "async copy": 1,
    "load constant": 1,
}


def counted(text: str) -> dict[str, int]:
    frame = ptx_text.count(text)
    assert list(frame) == ["kind", "instructions"]
    assert list(frame.kind) == [kind for kind in kinds.KINDS if kind in set(frame.kind)]
    return dict(zip(frame.kind, frame.instructions, strict=True))


def test_counts_by_hand():
    body = ptx_text.entry(CUDA, "naive")
    assert counted(body) == CUDA_KINDS
    assert counted(CUDA) == CUDA_KINDS | {"branch": 3}  # and the empty kernel's ret
    assert counted(ptx_text.entry(CUDA, "empty")) == {"branch": 1}
    assert counted(TRITON) == counted(ptx_text.entry(TRITON, "mm")) == TRITON_KINDS
    assert counted(SASS) == SASS_KINDS
    assert counted("") == counted("// add.f32 %f1, %f2, %f3;\n") == {}


def test_sass_with_the_disassemblers_comments_is_read_too():
    raw = re.sub(r"(?m)^([0-9a-f]{4}) (.*)$", r"        /*\1*/  \2 ;", SASS)
    assert "/*0150*/" in raw and counted(raw) == SASS_KINDS


def test_kinds_are_listed_once():
    assert len(set(kinds.KINDS)) == len(kinds.KINDS)
    assert {*CUDA_KINDS, *TRITON_KINDS, *SASS_KINDS} <= {*kinds.KINDS}
    words = [word for kind in kinds._SASS_KINDS.values() for word in kind.split()]
    assert len(set(words)) == len(words) and {*kinds._SASS_KINDS} <= {*kinds.KINDS}


def test_an_instruction_keeps_its_parts():
    found = ptx_text.instructions(TRITON)
    assert found[1] == kinds.Instruction(
        "@%p1", "ld.global.v4.b32", "{ %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ]"
    )
    assert ("@!complete", "bra.uni") in [(i.predicate, i.opcode) for i in found]
    assert ptx_text.instructions(SASS)[5].predicate == "@!P1"


def test_the_entry_of_a_kernel():
    body = ptx_text.entry(CUDA, "_Z5naivePfi")
    assert body == ptx_text.entry(CUDA, "naive")
    assert ".reg .pred" in body and "mov.b64" in body and body.rstrip().endswith("ret;")
    with pytest.raises(KeyError, match="no kernel 'gelu'; there are _Z5naivePfi, empty"):
        ptx_text.entry(CUDA, "gelu")


def test_fp64_instructions():
    lines = [line for line in CUDA.splitlines() if re.match(r"\s+[a-z].*f64", line)]
    assert ptx_text.fp64_instructions(CUDA, moves=True) == len(lines) == 7
    assert ptx_text.fp64_instructions(CUDA) == 6  # selp only chooses
    assert ptx_text.fp64_instructions(SASS) == 4  # DFMA, DSETP, F2F, MUFU.RCP64H
    assert ptx_text.fp64_instructions(TRITON, moves=True) == 0
    # A constant that the compiler has folded is no work in fp64.
    assert ptx_text.fp64_instructions("mul.f32 %f1, %f2, 0f3F000000;") == 0


def test_opcodes():
    found = ptx_text.opcodes(CUDA)
    assert found["ret"] == 2 and found["mov.u32"] == 3 and found["fma.rn.f64"] == 1
    assert found.total() == sum(CUDA_KINDS.values()) + 1


def test_widths_of_accesses():
    def widths(text):
        return [tuple(row) for row in ptx_text.bytes_per_access(text).itertuples(index=False)]

    assert widths(CUDA) == [("load global", 4, 1), ("store global", 4, 1)]
    expected = [("load global", 16, 1), ("store global", 16, 1), ("async copy", 16, 1)]
    assert widths(TRITON) == expected
    expected = [("load global", 16, 1), ("store global", 2, 1), ("async copy", 16, 1)]
    assert widths(SASS) == expected
    more = "ld.global.nc.v2.u8 {%r1,%r2}, [%rd1]; ld.global.L1::no_allocate.v8.b32 {%r1}, [%rd1];"
    assert widths(more) == [("load global", 2, 1), ("load global", 32, 1)]
    assert widths("0000  LDG.E.U8 R1, [R2]\n0010  LDG.E R1, [R2]\n0020  LDG.E.64 R1, [R2]\n") == [
        ("load global", size, 1) for size in (1, 4, 8)
    ]


NOTES = {
    "mov.u32 %r4, %ctaid.x": "block index x",
    "mad.lo.s32": "block index x * threads per block x + thread index x",
    "@%p1 bra": "if %p1: jump to $L__BB0_5",
    "setp.ge.s32": "32-bit integer: %p1 = (%r1 >= %r3)",
    "ld.param.u32": "argument 1",
    "cvta": "argument 0, as an address in global memory",
    "ld.global": "load 4 bytes from global memory",
    "cvt.f64.f32": "convert 32-bit float to 64-bit float",
    "mul.f64": "64-bit float: multiply on the fp64 unit (0d3FE988453365DE00 = 0.797885)",
    "fma.rn.f64": "64-bit float: multiply-add on the fp64 unit",
    "tanh": "32-bit float: approximate tanh, special function unit",
    "mul.f32": "32-bit float: multiply (0f3F4C422A = 0.797885)",
    "mov.b64": "split a register into its parts",
    "$L__BB0_4:": "store 4 bytes to global memory",
}


def test_notes():
    lines = notes.annotate(CUDA).splitlines()
    for start, note in NOTES.items():
        line = next(line for line in lines if line.strip().startswith(start))
        assert line.split(" // ")[1] == note
    assert sum(" // " in line for line in lines) == len(ptx_text.instructions(CUDA))
    assert "$L__BB0_5:" in lines and ".target sm_90" in lines
    assert not any("a comment" in line for line in lines)
    columns = {line.index(" // ") for line in lines if " // " in line}
    assert columns == {notes.WIDTH}


def test_notes_change_nothing():
    for text in (CUDA, TRITON):
        noted = notes.annotate(text)
        assert ptx_text.instructions(noted) == ptx_text.instructions(text)
        assert sum(" // " in line for line in noted.splitlines()) == len(
            ptx_text.instructions(text)
        )


def test_a_predicated_or_repeated_write_is_not_named():
    text = """mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    add.s32 %r1, %r1, 1;
    mad.lo.s32 %r3, %r1, %r2, %r2;"""
    assert notes.annotate(text).splitlines()[-1].endswith("// 32-bit integer: multiply-add")


def test_notes_of_tritons_instructions():
    noted = notes.annotate(TRITON)
    for words in (
        "if %p1: load 16 bytes from global memory",
        "copy 16 bytes between global and shared memory in the background",
        "tensor cores: multiply tiles and add (m64n64k16)",
        "wait for all threads of the block",
        "if not complete: jump to waitLoop",
        "atomic add: read, change and write, undisturbed by others",
        "take the value of the lane with the index's bits flipped (xor) of the warp",
    ):
        assert f"// {words}\n" in noted
