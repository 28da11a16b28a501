"""The launches of every Triton kernel of helpers, as their wrappers make them."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

import helpers
from helpers import memory_roofs, ptx
from helpers.device import device
from helpers.kernels import (
    attention_backward,
    attention_backward_hopper,
    attention_backward_plans,
    attention_hopper,
    attention_plans,
    attention_tiles,
    gelu,
    matmul_persistent,
    matmul_pingpong,
    matmul_plans,
    matmul_tiles,
    softmax,
    softmax_plans,
)
from helpers.ptx import triton_source
from helpers.triton_mode import triton

# With as much shared memory as sm_86 and, to Triton, the same instructions: it may stand for them.
LIKE_SM_86 = ("sm_89", "sm_120")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel as one kind of launch compiles it; the arguments of `ptx.triton_compiled`."""

    kernel: object
    signature: dict[str, str]
    constexprs: dict
    num_warps: int = 4
    num_stages: int = 3
    options: dict = dataclasses.field(default_factory=dict)
    architectures: tuple[str, ...] = ptx.ARCHITECTURES

    def __str__(self):
        values = {**self.signature, **self.constexprs, **self.options}
        values |= {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return f"{name(self.kernel)}({', '.join(f'{k}={v}' for k, v in values.items())})"

    def requests(self) -> list[ptx.Request]:
        """One for each of its architectures."""
        arguments = self.kernel, self.signature, self.constexprs
        choice = self.num_warps, self.num_stages, self.options
        return [ptx.Request(*arguments, arch, *choice) for arch in self.architectures]


def name(kernel) -> str:
    """The name of a decorated function."""
    while not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel.__name__


def specialised(value) -> str | tuple | None:
    """The type with which a launch compiles an argument; None for a number that it compiles in.

    As JITFunction.run does: addresses and whole numbers may be multiples of 16, and 1 is constant.
    """
    if isinstance(value, tuple):
        return tuple(specialised(part) or part for part in value)
    if isinstance(value, int) and value == 1:
        return None
    kind = importlib.import_module("triton.runtime.jit").mangle_type(value)
    if isinstance(value, torch.Tensor):
        return kind + ("" if value.data_ptr() % 16 == 0 else ":1")
    return kind + (":16" if isinstance(value, int) and value % 16 == 0 else "")


@contextlib.contextmanager
def recorded() -> Iterator[list[Case]]:
    """Inside, Triton kernels do not run: each launch adds a Case to the list."""
    launches = []

    def run(kernel, *values, grid, warmup, num_warps=4, num_stages=3, **named):
        parameters = inspect.signature(kernel.fn).parameters
        options = {k: v for k, v in named.items() if k not in parameters}
        named = {k: v for k, v in named.items() if k in parameters}
        arguments = dict(zip(parameters, values, strict=False)) | named
        fixed = {k for k, p in parameters.items() if "constexpr" in str(p.annotation)}
        types = {k: specialised(v) for k, v in arguments.items() if k not in fixed}
        signature = {k: kind for k, kind in types.items() if kind is not None}
        constants = {k: v for k, v in arguments.items() if k not in signature}
        launches.append(Case(kernel, signature, constants, num_warps, num_stages, options))

    interpreter = importlib.import_module("triton.runtime.interpreter")
    kinds = (triton.runtime.JITFunction, interpreter.InterpretedFunction)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "run", run))
        yield launches


def gelus() -> Iterator[Case]:
    def launched(dtype: torch.dtype, size: int, start: int = 0) -> list[Case]:
        x = torch.ones(size + start, dtype=dtype, device=device())[start:].requires_grad_()
        with recorded() as launches:
            gelu.triton_gelu(x).sum().backward()
        assert len(launches) == 2
        return launches

    yield from launched(torch.bfloat16, 4096)
    for dtype in (torch.float32, torch.float16):
        for case in launched(dtype, 4096):
            yield dataclasses.replace(case, architectures=("sm_75", "sm_80", "sm_90"))
    # The less usual: a view from element 1 on, a single element, more than 32 bits can count.
    unusual = launched(torch.bfloat16, 1000, 1) + launched(torch.bfloat16, 1)
    for case in launched(torch.bfloat16, 4096):
        unusual.append(dataclasses.replace(case, signature=case.signature | {"n": "i64:16"}))
    for case in unusual:
        yield dataclasses.replace(case, architectures=("sm_75", "sm_90"))


def memory() -> Iterator[Case]:
    x = torch.empty(16, device=device())
    for modifier in memory_roofs.PATHS.values():
        with recorded() as launches:
            arguments = x, x, memory_roofs.BLOCK, 9, memory_roofs.BLOCK, modifier
            memory_roofs.read_repeatedly_kernel[(1,)](*arguments, num_warps=8)
        yield from launches


def softmaxes() -> Iterator[Case]:
    def launched(columns: int, dtype: torch.dtype, launch=softmax.launch_triton_softmax) -> Case:
        x = torch.empty(5, columns, dtype=dtype, device=device())
        tensors = (x, x, x) if launch is backward else (x, x)
        # As on a GPU, where the programs that share a row run at the same time.
        gpu = dict(interpreting=lambda: False, programs_at_once=lambda device: 528)
        with mock.patch.multiple(softmax_plans, **gpu), recorded() as launches:
            launch(*tensors)
        (case,) = launches
        return case

    backward, online = softmax.launch_triton_softmax_backward, softmax.launch_online
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    # Each kernel where it is short of registers: wide rows, and rows that begin anywhere.
    yield launched(4096, fp32)
    yield launched(65536, fp32)
    yield launched(131073, fp32)
    yield launched(10007, bf16, online)
    yield launched(4096, bf16, backward)
    yield launched(65536, bf16, backward)
    for columns, dtype in ((1000, fp16), (1025, fp32), (57001, bf16), (65536, bf16)):
        case = launched(columns, dtype)
        yield dataclasses.replace(case, architectures=("sm_80", "sm_90"))
    for columns, dtype in ((127, fp32), (10007, fp32), (65536, fp32), (70002, bf16)):
        case = launched(columns, dtype, backward)
        yield dataclasses.replace(case, architectures=("sm_80", "sm_90"))


def matmuls() -> Iterator[Case]:
    """What each generation is given first; on Hopper all that it could be given."""

    def launched(plan, dtype, arch: str, activation=None, columns=False, precision="ieee") -> Case:
        a, b, c = (torch.empty(64, 64, dtype=dtype, device=device()) for _ in range(3))
        more = {"precision": precision} if plan.kernel == "tiles" else {}
        a = a.t() if columns else a
        with contextlib.ExitStack() as stack:
            for module in (matmul_tiles, matmul_persistent):  # as on a GPU
                stack.enter_context(mock.patch.object(module, "interpreting", lambda: False))
            for module in (matmul_persistent, matmul_pingpong):
                stack.enter_context(mock.patch.object(module, "sms", lambda device: 132))
            launches = stack.enter_context(recorded())
            matmul_plans.LAUNCHES[plan.kernel](a, b, c, plan.config, activation, **more)
        (case,) = launches
        return dataclasses.replace(case, architectures=(arch,))

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for arch in ptx.ARCHITECTURES:
        capability = divmod(int(arch.removeprefix("sm_")), 10)

        def first(dtype, precision="ieee", described=False, capability=capability):
            return matmul_plans.plans(capability, dtype, precision, described)[0]

        yield launched(first(bf16), bf16, arch)
        if arch not in LIKE_SM_86 or first(fp32) != first(fp32, capability=(8, 6)):
            yield launched(first(fp32), fp32, arch)
        if arch in ("sm_80", "sm_86", "sm_90"):
            yield launched(first(fp32, "tf32"), fp32, arch, precision="tf32")
        if capability[0] == 10:
            yield launched(first(bf16, described=True), bf16, arch, "gelu")
    deepest = {}  # of plans that differ in stages alone, that with the largest ring
    for plan in sorted(matmul_plans.HOPPER, key=lambda plan: plan.config.stages):
        deepest[plan.kernel, plan.config.tile_m, plan.config.tile_n] = plan
    for plan in deepest.values():
        yield launched(plan, bf16, "sm_90", "gelu")
    for kernel in ("pingpong", "persistent"):
        plan = next(plan for plan in matmul_plans.HOPPER if plan.kernel == kernel)
        yield launched(plan, fp16, "sm_90", columns=True)


def attentions() -> Iterator[Case]:
    """What each generation is given at some widths of a head, and all that Hopper has."""

    def launched(dim: int, dtype, arch: str, launch, *config, **lse) -> Case:
        q, k, v, o = (torch.empty(2, 2, 64, dim, dtype=dtype, device=device()) for _ in range(4))
        with contextlib.ExitStack() as stack:  # as on a GPU
            stack.enter_context(mock.patch.object(attention_tiles, "interpreting", lambda: False))
            stack.enter_context(mock.patch.object(attention_hopper, "sms", lambda device: 132))
            launches = stack.enter_context(recorded())
            launch(q, k, v, o, config[0], True, 0.1, *config[1:], **lse)
        (case,) = launches
        return dataclasses.replace(case, architectures=(arch,))

    def plain(dim: int, dtype, arch: str, precision: str = "ieee", **lse) -> Case:
        capability = divmod(int(arch.removeprefix("sm_")), 10)
        config, *_ = attention_plans.configs(capability, dtype, dim, precision)
        return launched(dim, dtype, arch, attention_tiles.launch_tiles, config, precision, **lse)

    sums = torch.empty(2, 2, 64, device=device())
    bf16, fp32 = torch.bfloat16, torch.float32
    for arch in ptx.ARCHITECTURES:
        yield plain(128, bf16, arch)
    yield plain(127, bf16, "sm_80")  # with an address for each element
    yield plain(256, bf16, "sm_90")
    yield plain(128, bf16, "sm_80", lse=sums)
    yield plain(128, fp32, "sm_80")
    yield plain(128, fp32, "sm_90", "tf32")
    for dim, queries in ((64, 512), (64, 4096), (128, 512), (256, 512)):
        config = attention_plans.hopper_config(dim, queries, causal=True)
        yield launched(dim, bf16, "sm_90", attention_hopper.launch_hopper, config)
    yield launched(256, bf16, "sm_90", attention_hopper.launch_hopper, config, lse=sums)


def attention_gradients() -> Iterator[Case]:
    """What each generation is given at some widths of a head, and all that Hopper has."""

    def launched(dim: int, dtype, arch: str, launches, kv_heads: int = 2) -> Iterator[Case]:
        q, do = (torch.empty(2, 2, 64, dim, dtype=dtype, device=device()) for _ in range(2))
        k, v = (torch.empty(2, kv_heads, 64, dim, dtype=dtype, device=device()) for _ in range(2))
        lse = torch.empty(2, 2, 64, device=device())
        gpu = mock.patch.object(attention_backward, "interpreting", lambda: False)
        sms = mock.patch.object(attention_backward_hopper, "sms", lambda device: 132)
        with gpu, sms, recorded() as recording:
            launches(q, k, v, lse, do)
        for case in recording:
            yield dataclasses.replace(case, architectures=(arch,))

    def plain(dim: int, dtype, arch: str, which="delta keys queries", precision="ieee", **heads):
        capability = divmod(int(arch.removeprefix("sm_")), 10)
        first, second = attention_backward_plans.configs(capability, dtype, dim, precision)

        def launches(q, k, v, lse, do):
            given, choices = (q, k, v, do, lse, lse), (True, 0.1, precision)
            if "delta" in which:
                attention_backward.launch_delta(q, do, lse)
            if "keys" in which:
                attention_backward.launch_keys_gradient(*given, k, v, first[0], *choices)
            if "queries" in which:
                attention_backward.launch_queries_gradient(*given, q, second[0], *choices)

        yield from launched(dim, dtype, arch, launches, **heads)

    def one_pass(q, k, v, lse, do, causal):
        dq = torch.empty(q.shape, device=device())
        attention_backward_hopper.launch_one_pass(q, k, v, q, lse, do, dq, k, v, causal)

    bf16, fp32 = torch.bfloat16, torch.float32
    for arch in ptx.ARCHITECTURES:
        yield from plain(128, bf16, arch)
    yield from plain(64, bf16, "sm_90", "keys")
    yield from plain(128, bf16, "sm_100", "keys", kv_heads=1)
    yield from plain(256, bf16, "sm_90", "keys queries")
    yield from plain(127, bf16, "sm_80")  # with an address for each element
    yield from plain(128, fp32, "sm_80", "keys")
    yield from plain(128, fp32, "sm_90", "queries", "tf32")
    for dim, causal in ((64, False), (64, True), (128, True)):
        launches = functools.partial(one_pass, causal=causal)
        yield from launched(dim, bf16, "sm_90", launches)


@functools.cache
def cases() -> tuple[Case, ...]:
    """All launches, each once, with all the architectures that it is compiled for."""
    found = {}
    for group in (gelus, memory, softmaxes, matmuls, attentions, attention_gradients):
        for case in group():
            known = found[str(case)].architectures if str(case) in found else ()
            archs = tuple(dict.fromkeys((*known, *case.architectures)))
            found[str(case)] = dataclasses.replace(case, architectures=archs)
    return tuple(found.values())


def kernels_without_a_case() -> set[str]:
    """The @triton.jit functions at the head of a module of helpers that no case compiles.

    Those that another kernel calls are compiled as its parts.
    """
    folder = Path(helpers.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        if re.search(r"\n@(triton|gluon)\.jit\n", path.read_text(encoding="utf-8")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            for value in vars(importlib.import_module(".".join(parts))).values():
                if isinstance(value, triton.runtime.KernelInterface):
                    found.add(name(value))
    for case in cases():
        found -= triton_source.gather(case.kernel, case.signature, case.constexprs).places.keys()
    return found
