"""Triton kernels to PTX for any GPU generation, also where kernels run in the interpreter.

Triton chooses between compiler and interpreter once a process, so a child process compiles, from
the kernel's source and from what that refers to. Results are kept on disk by content.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers import cache
from helpers.device import triton_version
from helpers.ptx.assembler import CompileError, ToolMissing, arch_number
from helpers.ptx.layouts import Tensor
from helpers.ptx.triton_source import Source, gather

CHILD = Path(__file__).with_name("child.py")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A Triton kernel for one architecture, and what it asks for at a launch."""

    ptx: str
    ttir: str  # Triton's first form: operations on whole tensors, of no particular GPU; Gluon: ""
    ttgir: str  # its second, with the layouts: which thread holds which elements
    name: str
    shared_bytes: int  # a block's, dynamic; ptxas does not see them
    num_warps: int
    num_stages: int
    tensor_memory_columns: int  # of 128 lanes x 4 bytes, from Blackwell's data-center chips on
    tensors: tuple[Tensor, ...] = dataclasses.field(repr=False)  # see helpers.ptx.layouts


@dataclasses.dataclass(frozen=True)
class Request:
    """One compilation; the arguments of `triton_compiled`."""

    kernel: object
    signature: dict[str, str | tuple]
    constexprs: dict | None = None
    arch: str = "sm_90"
    num_warps: int = 4
    num_stages: int = 3
    options: dict | None = None


def triton_ptx(kernel, signature: dict, constexprs: dict | None = None, arch="sm_90", **choice):
    """The PTX alone of `triton_compiled`."""
    return triton_compiled(kernel, signature, constexprs, arch, **choice).ptx


def triton_compiled(
    kernel,
    signature: dict[str, str | tuple],
    constexprs: dict | None = None,
    arch: str = "sm_90",
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    options: dict | None = None,
) -> Compiled:
    """Compile one kernel as a launch with these arguments would.

    kernel: the decorated function, in a module or a notebook's cell, interpreted or not; or a
        module's text, whose last function is the kernel.
    signature: the arguments' types by name: "*bf16" a pointer, "i32", "fp32". "i32:16" is known to
        be a multiple of 16, as Triton finds out at a launch; pointers are multiples of 16 bytes, as
        those of new tensors are, unless written "*bf16:1". A tuple's type is a tuple; a number in
        it is a constant, as 1 is at a launch.
    constexprs: the values of the tl.constexpr arguments; defaults count. An @autotune is left out.
    options: further options of Triton's, {"maxnreg": 64}.
    CompileError with the user's file and line, ToolMissing without Triton, ValueError when an
    argument has neither type nor value.
    """
    request = Request(kernel, signature, constexprs, arch, num_warps, num_stages, options)
    return triton_compile_many([request])[0]


def triton_compile_many(requests: Sequence[Request]) -> list[Compiled]:
    """`triton_compiled` for many kernels with one child process, whose start takes seconds.

    One CompileError names all that failed; the others are kept on disk all the same.
    """
    version = triton_version()
    if not version:
        raise ToolMissing(
            "Triton is missing, so its kernels cannot be shown as PTX here: install triton "
            "(Linux on x86-64)"
        )
    sources = [gather(r.kernel, r.signature, r.constexprs or {}) for r in requests]
    jobs = [_job(*pair) for pair in zip(requests, sources, strict=True)]
    about = version, CHILD.read_text(encoding="utf-8")
    keys = [cache.key(*about, json.dumps(job, sort_keys=True)) + ".json" for job in jobs]
    paths = {key: cache.folder("ptx") / key for key in keys}
    missing = {key: i for i, key in enumerate(keys) if not paths[key].exists()}
    answers = _run([jobs[i] for i in missing.values()])
    failures = []
    for (key, i), answer in zip(missing.items(), answers, strict=True):
        if "error" in answer:
            failures.append(_explain(answer, sources[i], requests[i].arch))
            continue
        text = json.dumps(answer)
        paths[key] = cache.file(
            "ptx", key, lambda path, text=text: path.write_text(text, encoding="utf-8")
        )
    if failures:
        raise CompileError("\n".join(failures))
    return [_compiled(paths[key]) for key in keys]


def _compiled(path: Path) -> Compiled:
    fields = json.loads(path.read_text(encoding="utf-8"))

    def frozen(value):
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    tensors = [{k: frozen(v) for k, v in tensor.items()} for tensor in fields.pop("tensors")]
    return Compiled(**fields, tensors=tuple(Tensor(**tensor) for tensor in tensors))


def _job(request: Request, source: Source) -> dict:
    number = arch_number(request.arch)
    known = {*request.signature, *source.constants}
    if set(source.arguments) != known:
        lacking = ", ".join(sorted(set(source.arguments) - known)) or "none"
        unknown = ", ".join(sorted(known - set(source.arguments))) or "none"
        raise ValueError(
            f"{source.name}: arguments without a type or value: {lacking}; not arguments: {unknown}"
        )
    twice = ", ".join({*request.signature} & {*(request.constexprs or {})})
    if twice:
        raise ValueError(f"{source.name}: arguments with a type and a value: {twice}")
    types, multiples, parts = {}, [], []
    for place, name in enumerate(source.arguments):
        kind = request.signature.get(name, "constexpr")
        types[name] = _type(kind, [place], multiples, parts)
    return {
        "source": source.text,
        "name": source.name,
        "signature": types,
        "constexprs": source.constants,
        "parts": parts,
        "multiples_of_16": multiples,
        "arch": number,
        "options": {
            "num_warps": request.num_warps,
            "num_stages": request.num_stages,
            **(request.options or {}),
        },
    }


def _type(kind: str | int | tuple, place: list[int], multiples: list, parts: list):
    """An argument's type as Triton has it; places of multiples of 16 and of constants are added."""
    if isinstance(kind, tuple):
        return [_type(part, [*place, i], multiples, parts) for i, part in enumerate(kind)]
    if isinstance(kind, int):
        parts.append([place, kind])
        return "constexpr"
    if not isinstance(kind, str):
        raise ValueError(f'a type is written as text, "i32", not {kind!r}')
    kind, _, multiple = kind.partition(":")
    if int(multiple or (16 if kind.startswith("*") else 1)) % 16 == 0:
        multiples.append(place)
    return kind


def _run(jobs: list[dict]) -> list[dict]:
    """The child's answers; one that dies is followed by another for the jobs behind the fatal."""
    # Line information would put the path of a temporary file into the PTX.
    environment = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1"}
    environment.pop("TRITON_INTERPRET", None)
    answers = []
    while len(answers) < len(jobs):
        child = subprocess.run(
            # -P: the folder of the child's file holds modules that must not shadow others
            [sys.executable, "-P", str(CHILD)],
            input=json.dumps(jobs[len(answers) :]),
            env=environment,
            capture_output=True,
            text=True,
        )
        answers += map(json.loads, child.stdout.splitlines())
        if len(answers) < len(jobs):
            if "Traceback" in child.stderr:  # a kernel's own errors come as answers
                raise CompileError(f"Triton does not start: {child.stderr.strip()[-1000:]}")
            death = f"Triton's compiler died with exit status {child.returncode}"
            answers.append({"error": death, "sites": [], "diagnostics": ""})
    return answers


def _explain(answer: dict, source: Source, arch: str) -> str:
    lines = [f"{source.name} for {arch}: {answer['error'].strip()}"]
    places = []
    for function, line in answer["sites"]:
        head = function.split("(", 1)[0].removeprefix("def ").strip()
        if head in source.places:
            file, first = source.places[head]
            places.append(f"{file}:{first + line - 1}: {function.splitlines()[line - 1].strip()}")
    lines += places[-1:]  # the innermost; what follows in the chain is Triton's own code
    noted = [text for text in answer["diagnostics"].splitlines() if "error:" in text]
    return "\n".join(lines + noted[:3])
