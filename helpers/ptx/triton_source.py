"""A Triton kernel's source as a text that stands alone: its helpers and constants included."""

import ast
import builtins
import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Collection

HEAD = "import triton\nimport triton.language as tl\nfrom triton.experimental import gluon\n"
KINDS = {"ConstexprFunction": "triton.constexpr_function", "GluonJITFunction": "gluon.jit"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A module's text around one kernel.

    `arguments` are the kernel's; `constants` those with a value, as expressions in that module;
    `places` says where each function's `def` stands: file and line.
    """

    text: str
    name: str
    arguments: tuple[str, ...]
    constants: dict[str, str]
    places: dict[str, tuple[str, int]]


def gather(kernel, signature: Collection[str], constexprs: dict) -> Source:
    """The source of a decorated kernel, or of a module's text whose last function is the kernel.

    Arguments that are neither in `signature` nor in `constexprs` take their defaults. TypeError
    for what is no kernel, ValueError when it refers to what cannot be written down.
    """
    collected = _Collector()
    if isinstance(kernel, str):
        name, arguments, defaults = collected.add_text(kernel)
    elif (function := _python_function(kernel)) is not None:
        name = collected.function(function, kernel)
        parameters = inspect.signature(function).parameters.values()
        arguments = tuple(parameter.name for parameter in parameters)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    else:
        raise TypeError(f"a kernel is a @triton.jit function or a text, not {kernel!r}")
    values = {**{k: v for k, v in defaults.items() if k not in signature}, **constexprs}
    constants = {argument: collected.value(value) for argument, value in values.items()}
    return Source(collected.text(), name, arguments, constants, collected.places)


def _python_function(value) -> types.FunctionType | None:
    # Autotuner, Heuristics, JITFunction and InterpretedFunction all keep what they wrap in `fn`.
    while not isinstance(value, types.FunctionType):
        value = getattr(value, "fn", None)
        if value is None:
            return None
    return value


class _Collector:
    """Gathers definitions by name, each once, those that others need first."""

    def __init__(self):
        self.parts: dict[str, str] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self._functions: dict[str, types.FunctionType] = {}

    def text(self) -> str:
        return HEAD + "".join(self.parts.values())

    def add_text(self, text: str) -> tuple[str, tuple[str, ...], dict]:
        """Add a module's text; returns its last function's name, arguments and defaults."""
        found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        if not found:
            raise ValueError("the text defines no function")
        self.parts["text"] = text.rstrip() + "\n"
        self.places |= {node.name: ("<text>", node.lineno) for node in found}
        arguments = tuple(argument.arg for argument in found[-1].args.args)
        values = list(map(ast.literal_eval, found[-1].args.defaults))
        defaults = dict(zip(arguments[len(arguments) - len(values) :], values, strict=True))
        return found[-1].name, arguments, defaults

    def function(self, function: types.FunctionType, wrapped) -> str:
        """Add a function and what it refers to; returns its name."""
        builtin = getattr(function, "__triton_builtin__", False)
        function = inspect.unwrap(function)
        name = function.__name__
        if self._functions.setdefault(name, function) is not function:
            raise ValueError(f"two different helpers of this kernel are called {name}: rename one")
        if name in self.places:
            return name
        lines, first = inspect.getsourcelines(function)
        source = textwrap.dedent("".join(lines))
        node = ast.parse(source).body[0]
        self.places[name] = (inspect.getsourcefile(function) or "?", first + node.lineno - 1)
        scope = {**vars(builtins), **function.__globals__}
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        scope |= {variable: cell.cell_contents for variable, cell in closure}
        for used in sorted(_names(node) - {name}):
            if used in scope and not hasattr(builtins, used):
                self._definition(used, scope[used])
        # Of the decorators only jit belongs here: @autotune would choose by running the kernel.
        marks = [d for d in node.decorator_list if _called(d).endswith(("jit", "_function"))]
        kind = KINDS.get(type(wrapped).__name__, "triton.jit")
        kind = "tl.core.builtin" if builtin else kind
        words = [ast.unparse(k) for d in marks if isinstance(d, ast.Call) for k in d.keywords]
        decorator = f"@{kind}({', '.join(words)})" if words else f"@{kind}"
        body = "".join(source.splitlines(keepends=True)[node.lineno - 1 :])
        self.parts[name] = f"\n\n{decorator}\n{body.rstrip()}\n"
        return name

    def _definition(self, name: str, value) -> None:
        if name in self.parts or (name in ("tl", "triton") and isinstance(value, types.ModuleType)):
            return
        if isinstance(value, types.ModuleType):
            root = value.__name__.split(".")[0]
            if root != "triton" and root not in sys.stdlib_module_names:
                raise ValueError(
                    f"a kernel uses the module {value.__name__}: import what it needs by name"
                )
            self.parts[name] = f"import {value.__name__} as {name}\n"
            return
        text = self.value(value)
        if text != name:
            self.parts[name] = f"{name} = {text}\n"

    def value(self, value) -> str:
        """An expression for a constant or helper; what it needs is added first."""
        kind = type(value).__name__
        module = getattr(value, "__module__", None) or ""
        function = _python_function(value)
        if kind == "dtype" and type(value).__module__.startswith("triton"):
            return f"tl.dtype({value.name!r})"
        if kind == "constexpr":
            return f"tl.constexpr({self.value(value.value)})"
        if isinstance(value, (tuple, list)):
            inner = "".join(f"{self.value(item)}, " for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, float):
            return f"float({str(value)!r})"  # also infinities
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        module = (function.__module__ if function else module) or ""
        if module.split(".")[0] == "triton":
            name = value.__name__
            self.parts.setdefault(f"{module}.{name}", f"from {module} import {name}\n")
            return name
        if function is not None:
            return self.function(function, value)
        raise ValueError(f"a kernel refers to {value!r}, which its compiler could not know")


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _names(node: ast.FunctionDef) -> set[str]:
    """The names that a function reads, its decorators aside."""
    parts = [node.args, *node.body, *filter(None, [node.returns])]
    loads = {n.id for p in parts for n in ast.walk(p) if isinstance(n, ast.Name)}
    stores = {n.id for p in parts for n in ast.walk(p) if _stored(n)}
    return loads - stores - {argument.arg for argument in ast.walk(node.args) if _is_arg(argument)}


def _stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _is_arg(node: ast.AST) -> bool:
    return isinstance(node, ast.arg)
