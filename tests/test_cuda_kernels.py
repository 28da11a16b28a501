"""Every CUDA kernel against a float64 reference: emulated, as PTX and machine code, on a GPU."""

import ast
import re
from collections.abc import Iterator

import pytest
import torch
from cuda_cases import CASES, Case, Launch
from notebook_files import NOTEBOOKS, code_cells, read

from helpers import cuda, cuda_source, ptx
from helpers.check import relative_error
from helpers.device import device, has_cuda
from helpers.emulator import KernelFault

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def error(launch: Launch, tolerance: float) -> str:
    """What is wrong with the contents of a launch's tensors; "" when nothing is."""
    for position, expected in launch.expected.items():
        found = relative_error(launch.arguments[position], expected)
        if not found <= tolerance:
            return f"argument {position} has a relative error of {found:.2g}"
    return ""


def emulated(kernel: cuda.Kernel, case: Case, size, **options) -> Launch:
    launch = case.launch(size, CPU)
    kernel.emulate(launch.grid, launch.block, *launch.arguments, **options)
    return launch


def launched(case: Case, size) -> Launch:
    launch = case.launch(size, device())
    case.load()(launch.grid, launch.block, *launch.arguments)
    return launch


def test_every_kernel_has_a_case():
    texts = {path.name: path.read_text() for path in cuda.KERNELS.glob("*.cu")}
    there = {(file, name) for file, text in texts.items() for name in cuda_source.kernels(text)}
    assert there == {(case.file, case.kernel) for case in CASES}
    for file, text in texts.items():  # none is written so that its signature cannot be read
        heads = re.findall(r"\b__global__\b", cuda_source.code_alone(text))
        assert len(heads) == len(cuda_source.kernels(text)), file


@each_case
def test_emulator_against_the_reference(case):
    kernel = case.load()
    for size in case.sizes:
        launch = emulated(kernel, case, size)
        assert not error(launch, case.tolerance), (size, error(launch, case.tolerance))


@each_case
def test_results_do_not_depend_on_the_order_of_threads(case):
    kernel, size = case.load(), case.sizes[-1]
    for order in ("reverse", 1, 2):
        launch = emulated(kernel, case, size, order=order)
        assert not error(launch, case.tolerance), order


@on_gpu
@each_case
def test_gpu_against_the_reference_and_the_emulator(case):
    tolerance = case.gpu_tolerance or case.tolerance
    for size in case.sizes:
        launch = launched(case, size)
        assert not error(launch, tolerance), (size, error(launch, tolerance))
        other = emulated(case.load(), case, size)
        for position in launch.expected:  # both are off by up to the tolerance
            found = relative_error(launch.arguments[position], other.arguments[position])
            assert found <= 2 * tolerance, (size, position)


def test_slide_lets_each_lane_take_its_own_steps():
    (case,) = (case for case in CASES if case.kernel == "slide")
    launch = launched(case, (20, 3))
    start, end = (clocks.cpu() for clocks in launch.arguments[:2])
    lane = torch.arange(32)
    taken = torch.stack([lane < 20, lane < 20, lane >= 20, lane >= 20, lane >= 0])
    assert torch.equal(start != -1, taken) and torch.equal(end != -1, taken)
    assert (end >= start)[taken].all()


def test_handshake_fails_where_one_side_runs_to_its_end():
    # The emulator changes threads after some 4,000 accesses: later than this patience.
    (case,) = (case for case in CASES if case.kernel == "handshake")
    for order in ("forward", "reverse"):
        answered = emulated(case.load(), case, 100, order=order).arguments[1]
        assert answered.sum() < 2, order


VARIANTS = sorted({(case.file, case.defines) for case in CASES if case.kernel != "gelu_naive"})


# The oldest, the recorded runs' and the newest: it takes long.
ASSEMBLED = ("sm_75", "sm_90", "sm_120")
# To a compiler of PTX these are their neighbours: a variant of each file and number type will do.
LIKE_OTHERS = ("sm_80", "sm_86", "sm_89", "sm_100")


def variants(arch: str) -> list:
    if arch not in LIKE_OTHERS:
        return VARIANTS
    each = {(file, dict(defines).get("scalar")): (file, defines) for file, defines in VARIANTS}
    return list(each.values())


@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_every_variant_compiles_and_nothing_spills(arch):
    pytest.importorskip("cuda.bindings.nvrtc")
    for file, defines in variants(arch):
        text = ptx.cuda_ptx(
            (cuda.KERNELS / file).read_text(), arch, name=file, defines=dict(defines)
        )
        kernels = {case.kernel for case in CASES if case.file == file}
        for kernel in kernels:
            fp64 = ptx.fp64_instructions(ptx.entry(text, kernel))
            assert fp64 > 40 if kernel == "gelu_naive" else fp64 == 0, (kernel, fp64)
        if arch not in ASSEMBLED:
            continue
        try:
            assembled = ptx.assemble(text, arch)
        except ptx.ToolMissing as missing:
            pytest.skip(str(missing))
        assert set(assembled) == kernels
        for kernel, needs in assembled.items():
            assert needs.spill_store_bytes == needs.spill_load_bytes == 0, (kernel, defines)


@pytest.mark.parametrize(
    "kernel, defines, load_bytes",
    [
        ("gelu_float", {}, 4),
        ("gelu_four", {}, 4),
        ("gelu_float4", {}, 16),
        ("gelu_kernel", {"scalar": "float", "vector_bytes": "4"}, 4),
        ("gelu_kernel", {"scalar": "__half", "vector_bytes": "16"}, 16),
        ("gelu_kernel", {"scalar": "__nv_bfloat16", "vector_bytes": "16"}, 16),
    ],
)
def test_a_thread_reads_as_many_bytes_at_once_as_it_says(kernel, defines, load_bytes):
    pytest.importorskip("cuda.bindings.nvrtc")
    file = "gelu.cu" if kernel == "gelu_kernel" else "gelu_steps.cu"
    accesses = ptx.bytes_per_access(cuda.load(file, kernel, **defines).ptx())
    assert accesses[accesses["kind"].str.contains("load")]["bytes"].max() == load_bytes


# Kernel -> edits of its text, each of which makes it wrong.
MUTANTS = {
    "gelu_naive": (
        ("if (i < n) {", "{"),
        ("i < n", "i <= n"),
        ("blockIdx.x * blockDim.x", "blockIdx.x * 256"),
        ("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
        ("0.044715", "0.044751"),
    ),
    "gelu_float4": (
        ("i + 3 < n", "i < n"),
        ("i + 3 < n", "i + 3 <= n"),
        ("= 4 * (", "= ("),
        ("for (; i < n; ++i)", "if (i < n)"),
        ("FORM(v.y), FORM(v.z)", "FORM(v.z), FORM(v.y)"),
    ),
    "gelu_four": (
        ("i < n ? x[i] : 0.0f", "x[i]"),
        ("if (i < n) y[i]", "y[i]"),
        ("first + k * blockDim.x", "first + k"),
        ("4 * blockIdx.x * blockDim.x", "blockIdx.x * blockDim.x"),
    ),
    "gelu_kernel": (
        ("i + width <= n", "i + width <= n + 1"),
        ("i + width <= n", "i < n"),
        (") * width;", ");"),
        ("k < width;", "k < width - 1;"),
        ("for (; i < n; ++i)", "if (i < n)"),
        ("for (; i < n; ++i)", "for (; i <= n; ++i)"),
    ),
    "who_am_i": (
        ("row * columns + column", "column * rows + row"),
        ("row >= rows || ", ""),
        (" || column >= columns", ""),
        ("threadIdx.y * blockDim.x + threadIdx.x", "threadIdx.x * blockDim.y + threadIdx.y"),
        ("blockIdx.y * blockDim.y", "blockIdx.y * blockDim.x"),
        ("place / warpSize", "place % warpSize"),
    ),
    "branches": (("i / span % ways", "i % ways"),),
    "slide": (("lane < split", "lane <= split"),),
    "short_branch": (("if (i >= n) return;", ""), ("v < 0.0f", "v > 0.0f")),
    "long_branch": (("s < steps", "s <= steps"),),
}


@pytest.mark.parametrize(
    "kernel, before, after",
    [(kernel, *edit) for kernel, edits in MUTANTS.items() for edit in edits],
)
def test_mutants_are_caught(kernel, before, after):
    case = [case for case in CASES if case.kernel == kernel][-1]
    right = case.load()
    assert before in right.function
    wrong = right.text.replace(right.function, right.function.replace(before, after))
    mutant = cuda.Kernel(wrong, kernel, case.file, case.defines)
    for size in case.sizes:
        try:
            if error(emulated(mutant, case, size), case.tolerance):
                return
        except KernelFault as fault:
            assert fault.kernel == kernel
            return
    pytest.fail("the mutant's results are right for all sizes")


@pytest.mark.parametrize("kernel", ["gelu_float4", "gelu_kernel"])
def test_vectors_at_a_misaligned_address_are_a_fault(kernel):
    case = [case for case in CASES if case.kernel == kernel][-1]
    launch = case.launch(1025, CPU)
    x, y, *rest = launch.arguments
    for arguments in ((x[1:], y, 1024), (x, y[1:], 1024)):
        with pytest.raises(KernelFault, match=r"of [xy], an address that is no multiple") as fault:
            case.load().emulate(launch.grid, launch.block, *arguments)
        assert fault.value.kind == "misaligned access"


# The CUDA texts that notebooks hold themselves


def cuda_texts(source: str) -> Iterator[str]:
    """The string constants of a cell that are CUDA; Python scripts that hold some are not."""
    magic = re.compile(r"^\s*[%!].*$", re.MULTILINE)
    tree = ast.parse(magic.sub("pass", source))
    pieces = {
        id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in pieces
        ):
            script = re.search(r"^(import|from) \w+", node.value, re.MULTILINE)
            if "__global__" in node.value and not script:
                yield node.value


NOTEBOOK_TEXTS = [
    pytest.param(text, id=f"{path.stem}-{cell.id}")
    for path in NOTEBOOKS
    for cell in code_cells(read(path))
    if "__global__" in cell.source
    if "broken" not in cell.id and "NotImplementedError" not in cell.source
    for text in cuda_texts(cell.source)
]


@pytest.mark.parametrize("text", NOTEBOOK_TEXTS)
def test_cuda_in_notebooks_compiles(text):
    pytest.importorskip("cuda.bindings.nvrtc")
    code = ptx.cuda_ptx(text, "sm_90")
    for kernel in cuda_source.kernels(text):
        assert ptx.entry(code, kernel)
        assert isinstance(cuda.Kernel(text, kernel).parameters, tuple)


def test_cuda_is_found_in_cells():
    text = 'extern "C" __global__ void k(int* x) { x[0] = 1; }'
    cell = (
        f"%matplotlib inline\nK = '''{text}'''\nf('__global__')\n!ls\n"
        f'S = """import torch\n{text.replace(chr(34), chr(39))}"""\nx = f"__global__ {{cell}}"\n'
    )
    assert list(cuda_texts(cell)) == [text, "__global__"]
