"""Every Triton kernel of helpers compiles for every generation, fits, and does not spill."""

import os

import pytest

pytest.importorskip("triton")

from triton_cases import LIKE_SM_86, cases, kernels_without_a_case, name  # noqa: E402

from helpers import ptx, specs  # noqa: E402


@pytest.fixture(scope="module")
def compiled():
    """Each case on each of its architectures, from one child process: (case, arch, Compiled).

    SAMPLE_ONLY (test_older_triton.py sets it): a part of them.
    """
    pairs = [(case, request) for case in cases() for request in case.requests()]
    pairs = sample(pairs) if "SAMPLE_ONLY" in os.environ else pairs
    answers = ptx.triton_compile_many([request for _, request in pairs])
    return [(c, r.arch, one) for (c, r), one in zip(pairs, answers, strict=True)]


def sample(pairs: list) -> list:
    """All of Hopper's, and for generations with other tensor cores each kernel that uses them."""
    chosen = {}
    for case, request in pairs:
        if request.arch == "sm_90":
            chosen[str(case), request.arch] = case, request
        elif name(case.kernel).startswith(("matmul", "attention")):
            if not another_stands_for(case, request.arch):
                chosen.setdefault((name(case.kernel), request.arch), (case, request))
    return list(chosen.values())


def another_stands_for(case, arch: str) -> bool:
    """Whether sm_80, or else sm_86, is compiled for the same case and stands for this one."""
    alike = ("sm_80", "sm_86") if arch in LIKE_SM_86 else ("sm_80",) if arch == "sm_86" else ()
    return any(one in case.architectures for one in alike)


def stood_for(case, arch: str) -> list[str]:
    """This architecture, and those among the case's for which it may stand."""
    alike = {"sm_80": ("sm_86", *LIKE_SM_86), "sm_86": LIKE_SM_86}.get(arch, ())
    return [arch, *(other for other in case.architectures if other in alike)]


def shared_limit_bytes(arch: str) -> int:
    """The shared memory that one block may have."""
    kb = specs.UNITS[f"{arch[3:-1]}.{arch[-1]}"]["shared"]
    # From Ampere on the system keeps 1 KB for itself in every block.
    return (kb - (arch != "sm_75")) * 1024


ONLY = {  # kernels that not every generation is given
    "matmul_persistent_kernel": {"sm_90", "sm_100"},
    "matmul_pingpong_kernel": {"sm_90"},
    "attention_hopper_kernel": {"sm_90"},
    "attention_backward_hopper_kernel": {"sm_90"},
    "prepare_kernel": {"sm_90"},
}


def test_every_kernel_has_a_case_for_every_generation_that_runs_it():
    assert kernels_without_a_case() == set()
    compiled_for = {}
    for case in cases():
        compiled_for.setdefault(name(case.kernel), set()).update(case.architectures)
    everywhere = set(ptx.ARCHITECTURES)
    assert compiled_for == {kernel: ONLY.get(kernel, everywhere) for kernel in compiled_for}
    assert ONLY.keys() < compiled_for.keys()


def test_a_block_fits_every_generation(compiled):
    assert shared_limit_bytes("sm_75") == 64 * 1024
    assert shared_limit_bytes("sm_80") == 163 * 1024 and shared_limit_bytes("sm_86") == 99 * 1024
    too_large = [
        f"{case} for {arch}: {one.shared_bytes} bytes"
        for case, arch, one in compiled
        if one.shared_bytes > min(map(shared_limit_bytes, stood_for(case, arch)))
    ]
    assert too_large == []


# dK and dV fill the registers of its groups, so what is the same for all queries of a tile of keys
# goes to local memory: that costs nothing, unless the loop over the queries uses it.
SPILLING = {"attention_backward_hopper_kernel"}
IN_LOOP = 8  # accesses to local memory that may be left there


def local_accesses_between_products(sass: str) -> list[int]:
    """Those of each role of the warps that has products, from the first of these to the last."""
    found = []
    for role in sass.split("USETMAXREG"):
        lines = role.splitlines()
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        if products:
            between = lines[products[0] : products[-1]]
            found.append(sum("STL" in line or "LDL" in line for line in between))
    return found


def test_nothing_spills(compiled):
    spilled = []
    for case, arch, one in compiled:
        if arch == "sm_75" and "SAMPLE_ONLY" in os.environ:
            continue  # it may spill (see below); the newest Triton's is assembled
        used = ptx.assemble(one.ptx, arch)[one.name]
        assert 8 <= used.registers <= 255 and len(used.cubin) > 1000
        if one.name in SPILLING:
            in_loops = local_accesses_between_products(ptx.assembler.sass(one.ptx, arch, one.name))
            assert len(in_loops) == 2, "two groups of warps multiply"
            if max(in_loops) > IN_LOOP:
                spilled.append(f"{case} for {arch}: {in_loops} accesses between its products")
        elif used.spill_store_bytes or used.spill_load_bytes:
            spilled.append(f"{case} for {arch}: {used}")
    # Triton has no tensor-core instruction for Turing, so that a matrix product may spill there.
    assert [text for text in spilled if "for sm_75" not in text] == []
