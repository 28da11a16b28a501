"""The child process of helpers.ptx.triton_kernels: compiles kernels with Triton in compiler mode.

Run as a file, so that nothing of `helpers` loads: helpers.device would choose the interpreter.
It reads requests (JSON) from standard input and writes one line of JSON per request.
"""

import importlib.util
import json
import os
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

    with open(path, "w", encoding="utf-8") as file:  # Triton reads a function's source from a file
        file.write(request["source"])
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {key: eval(text, vars(module)) for key, text in request["constexprs"].items()}
    kernel = getattr(module, request["name"])
    aligned = {(place,): [["tt.divisibility", 16]] for place in request["multiples_of_16"]}
    compiled = triton.compile(
        ASTSource(kernel, signature=request["signature"], constexprs=values, attrs=aligned),
        target=GPUTarget("cuda", request["arch"], 32),
        options=request["options"],
    )
    metadata = compiled.metadata
    return {
        "ptx": compiled.asm["ptx"],
        "ttgir": compiled.asm["ttgir"],
        "name": metadata.name,
        "shared_bytes": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "tensor_memory_columns": getattr(metadata, "tmem_size", 0),
    }


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
