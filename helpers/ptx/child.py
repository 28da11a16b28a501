"""The child process of helpers.ptx.triton_kernels: compiles kernels with Triton in compiler mode.

Run as a file, so that nothing of `helpers` loads: helpers.device would choose the interpreter.
It reads requests (JSON) from standard input and writes one line of JSON per request.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Triton prints must not mix with the answers
    from triton.backends.nvidia.compiler import CUDABackend

    # PTX is the aim; the assembler's step would double the time, and helpers.ptx.assembler does it
    # with more to tell.
    CUDABackend.make_cubin = lambda *args, **kwargs: b""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for number, request in enumerate(json.load(sys.stdin)):
            path = os.path.join(folder, f"kernel{number}.py")
            print(json.dumps(_answer(request, path)), file=answers, flush=True)


def _answer(request: dict, path: str) -> dict:
    # The compiler's C++ part writes its diagnostics to file descriptor 2.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as diagnostics:
        stderr = os.dup(2)
        os.dup2(diagnostics.fileno(), 2)
        try:
            return _compile(request, path)
        except Exception as error:
            os.lseek(2, 0, os.SEEK_SET)
            return _failure(error, diagnostics.read())
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _compile(request: dict, path: str) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    with open(path, "w", encoding="utf-8") as file:  # Triton reads a function's source from a file
        file.write(request["source"])
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {key: eval(text, vars(module)) for key, text in request["constexprs"].items()}
    kernel = getattr(module, request["name"])
    values |= {tuple(place): value for place, value in request["parts"]}
    aligned = {tuple(place): [["tt.divisibility", 16]] for place in request["multiples_of_16"]}
    target = GPUTarget("cuda", request["arch"], 32)
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(
        source(kernel, signature=_tuples(request["signature"]), constexprs=values, attrs=aligned),
        target=target,
        options=request["options"],
    )
    metadata = compiled.metadata
    ttgir = _plain(compiled.asm["ttgir"])
    return {
        "ptx": compiled.asm["ptx"],
        "ttir": _plain(compiled.asm.get("ttir", "")),
        "ttgir": ttgir,
        "name": metadata.name,
        "shared_bytes": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "tensor_memory_columns": getattr(metadata, "tmem_size", 0),
        "tensors": _tensors(ttgir, target, path + ".mlir"),
    }


def _tuples(types):
    if isinstance(types, dict):
        return {name: _tuples(kind) for name, kind in types.items()}
    return tuple(map(_tuples, types)) if isinstance(types, list) else types


def _plain(text: str) -> str:
    """An intermediate form without locations, which say nothing here and hide the rest."""
    text = re.sub(r"(?m)^#loc.*\n", "", text)
    return re.sub(r' loc\((#loc\d*|unknown|"[^"]*"(\(#loc\d*\))?)\)', "", text)


def _tensors(ttgir: str, target, path: str) -> list[dict]:
    """What helpers.ptx.layouts.Tensor holds, each operation with each type once.

    Tensors that a cluster of blocks shares are left out.
    """
    from triton._C.libtriton import gluon_ir, ir
    from triton.compiler import make_backend

    with open(path, "w", encoding="utf-8") as file:
        file.write(ttgir)
    context = ir.context()
    ir.load_dialects(context)
    make_backend(target).load_dialects(context)
    module = ir.parse_mlir_module(path, context)
    # Gluon, the language below Triton, names layouts; it is the one way from Python to the rule
    # that the compiler itself goes by.
    builder = gluon_ir.GluonOpBuilder(context)
    found = {}

    def visit(operation) -> None:
        values = [operation.get_result(i) for i in range(operation.get_num_results())]
        values = [value for value in values if "tensor<" in str(value.get_type())]
        if not values and operation.get_num_operands():
            values = [operation.get_operand(0)]
        for value in values:
            name, kind = operation.get_name(), str(value.get_type())
            match = re.fullmatch(r"tensor<([\dx]+)x(.+?), (#.+)>", kind)
            if match is None or (name, kind) in found:
                continue
            shape = [int(size) for size in match[1].split("x")]
            layout = builder.get_gluon_layout_from_tensor(value)
            if not hasattr(layout, "reg_bases"):
                layout = builder.to_linear_layout(layout._to_ir(builder), shape)
            if layout.block_bases:
                continue
            found[name, kind] = {
                "operation": name,
                "element": re.sub(r"!tt\.ptr<(.*)>", r"\1", match[2]),
                "shape": shape,
                "layout": match[3],
                "register": layout.reg_bases,
                "lane": layout.lane_bases,
                "warp": layout.warp_bases,
            }

    module.walk(visit)
    return list(found.values())


def _failure(error: BaseException, diagnostics: str) -> dict:
    # The innermost error is the cause; those around it say which call led there. Each that knows
    # its place has the text of a function and a line in it.
    sites = []
    while True:
        source, node = getattr(error, "src", None), getattr(error, "node", None)
        if source and hasattr(node, "lineno"):
            sites.append([source, node.lineno])
        if error.__cause__ is None:
            break
        error = error.__cause__
    plain = "".join(traceback.format_exception_only(error)).strip()
    message = getattr(error, "error_message", None) or plain
    return {"error": message, "sites": sites, "diagnostics": diagnostics}


if __name__ == "__main__":
    main()
