"""Conversion of a function to code: its source, and a call that passes the variables and submits the return value.

Only the source is sent, so every name in it must exist in the sandbox.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import json
import re
import symtable
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..errors import ConfigurationError
from ..wire.names import QUERY_ERROR_NAMES, QUERY_NAMES, VOLUME_NAMES, add_article
from .code_text import parse_module, remove_indent

# Functions and constants that the sandbox may define for code.
PROVIDED_NAMES = {"SUBMIT", "display", "report", "VolumeError", *VOLUME_NAMES, *QUERY_NAMES, *QUERY_ERROR_NAMES}
FUTURE_LINE = "from __future__ import annotations\n"
# The call gets builtins by __import__, because a variable may hide any other builtin.
CALL = """
(lambda value, python: None if value is None else (
    SUBMIT(**value)
    if python.isinstance(value, python.dict) and python.all(python.isinstance(key, python.str) for key in value)
    else SUBMIT(value)
))(
    {call}(**(lambda names: {{name: names[name] for name in {required} + {optional} if name in names}})(
        __import__("builtins").globals()
    )),
    __import__("builtins"),
)
"""
CALL_PATTERN = re.compile(
    r"^    (?P<await>await )?(?P<name>\w+)\("
    r".* for name in \[(?P<required>.*?)\] \+ \[(?P<optional>.*?)\] if name in names\}",
    re.MULTILINE,
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef
CALL_END = CALL[CALL.index("\n    )),") :]


@dataclass(frozen=True, slots=True)
class FunctionParameters:
    """The parameters of a converted function: `names` lists all, `required` the parameters without a default."""

    function: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    is_async: bool = False

    def check(self, variables: Iterable[str], *, needs_all: bool) -> None:
        """Raise ConfigurationError for a variable that is not a parameter and, with `needs_all`, for a missing one."""
        variables = set(variables)
        takes = f"it has {', '.join(self.names)}" if self.names else "it has none"
        if unknown := sorted(variables.difference(self.names)):
            raise ConfigurationError(f"{self.function}() has no parameter for the variable {unknown[0]!r}: {takes}")
        if needs_all and (missing := [name for name in self.required if name not in variables]):
            raise ConfigurationError(
                f"{self.function}() needs a value for {missing[0]!r}: pass a variable of that name, or "
                "give it a default"
            )


def convert_code(code: Any, tools: Collection[str] = (), variables: Collection[str] | None = None) -> Any:
    """Return code that defines a function, calls it and submits its return value. Return a non-callable unchanged.

    The variables are the arguments. A parameter without a variable takes its default, or a global of earlier code.
    A returned dict is submitted as fields and any other value as `output`; None submits nothing. An async function is
    awaited. The `def` is on line 1, or on line 2 after a future import of annotations, so line numbers count from the
    function's beginning. Equal functions give equal code, wherever they are defined.

    Args:
        code: A plain function, or any object that is not callable, such as the text of a program.
        tools: Names of host functions that the function may call.
        variables: Names of the variables of every call, or None if they differ.

    Raises:
        ConfigurationError: The object is not a plain function with source, or a variable is not a parameter.
    """
    if isinstance(code, str) or not callable(code):
        return code
    text, parameters = _build_definition(code, tools)
    if variables is None:
        return text + _build_call(parameters, parameters.names)
    parameters.check(variables, needs_all=False)
    # In a session, globals from earlier calls may exist. An optional parameter without a variable takes its default.
    names = [name for name in parameters.names if name in variables or name in parameters.required]
    return text + _build_call(parameters, names)


def find_parameters(code: Any) -> FunctionParameters | None:
    """Return the parameters of the function in code that `convert_code` built, or None for other code."""
    found = CALL_PATTERN.search(code) if isinstance(code, str) and code.endswith(CALL_END) else None
    if found is None:
        return None
    required, optional = (tuple(re.findall(r"\w+", found[group])) for group in ("required", "optional"))
    parameters = FunctionParameters(found["name"], (*required, *optional), required, found["await"] is not None)
    return parameters if code.endswith(_build_call(parameters, parameters.names)) else None


def _build_definition(function: Callable[..., Any], tools: Collection[str]) -> tuple[str, FunctionParameters]:
    """Return the source of the function, and its parameters. Raises ConfigurationError."""
    name, plain = _check_kind(function)
    text, definition = _read_definition(name, plain)
    _check_definition(name, definition)
    flags = plain.__code__.co_flags & __future__.annotations.compiler_flag
    # Defer annotations also if a parameter hides a builtin, because annotations may use that builtin.
    is_waiting = bool(flags) or any(hasattr(builtins, parameter) for parameter in _list_names(definition))
    own = {definition.name, *PROVIDED_NAMES, *tools}
    foreign = _find_foreign_global(FUTURE_LINE + text if is_waiting else text, own, plain)
    if foreign is not None and not is_waiting:  # the name may occur only in annotations, which can be deferred
        is_waiting, foreign = True, _find_foreign_global(FUTURE_LINE + text, own, plain)
    if foreign is not None:
        raise _refuse(name, _explain_global(foreign, plain))
    # Compare byte code only after the check of global names: CPython compiles calls of imported names differently, and
    # this text lacks the imports of its module.
    if not _is_compiled_from(plain, text, definition, flags):
        raise _refuse(name, "its file changed since it was imported. Import it again")
    _check_defaults(name, plain, definition)
    if is_waiting:
        text = FUTURE_LINE + text
    arguments = definition.args
    is_required = [True] * (len(arguments.args) - len(arguments.defaults)) + [False] * len(arguments.defaults)
    is_required += [default is None for default in arguments.kw_defaults]
    names = _list_names(definition)
    required = [name for name, needs_value in zip(names, is_required, strict=True) if needs_value]
    optional = [name for name in names if name not in required]
    is_async = isinstance(definition, ast.AsyncFunctionDef)
    return text, FunctionParameters(definition.name, (*required, *optional), tuple(required), is_async)


def _refuse(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"the function {name} cannot be sent to a sandbox: {reason}")


def _check_kind(function: Any) -> tuple[str, FunctionType]:
    """Return the function's name, and the function. Raises ConfigurationError if it is not a plain function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if isinstance(function, MethodType):
        raise _refuse(
            name, "it is a method, and its object cannot be sent. Pass a function with the values as parameters"
        )
    if isinstance(function, BuiltinFunctionType):
        raise _refuse(name, "it is not written in Python. Call it from your own function")
    if isinstance(function, type):
        raise ConfigurationError(f"the class {name} is not code: pass a function that creates the object")
    if not isinstance(function, FunctionType):
        kind = type(function).__qualname__
        if hasattr(function, "__wrapped__"):
            raise _refuse(name, f"a decorator turned it into {add_article(kind)}. Pass the function itself")
        raise ConfigurationError(f"code is {add_article(kind)}: pass the text of a Python program, or a plain function")
    if function.__code__.co_name == "<lambda>":
        raise _refuse(name, "it is a lambda. Write it with def")
    if hasattr(function, "__wrapped__"):
        raise _refuse(name, "it is decorated. Pass the function without its decorators")
    if function.__code__.co_freevars:
        outer = ", ".join(function.__code__.co_freevars)
        raise _refuse(name, f"it is a closure: it uses {outer} of the function around it. Make that a parameter")
    around = function.__qualname__.rpartition(".")[0]
    if around and not around.endswith("<locals>"):
        raise _refuse(name, "it is a method. Pass a plain function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _refuse(name, "it is a generator. Return a list in place of yield")
    return name, function


def _read_definition(name: str, function: FunctionType) -> tuple[str, Definition]:
    """Return the function's dedented source with one final newline, and its syntax tree. Raises ConfigurationError."""
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise _refuse(name, "its source is unknown, as in a Python prompt. Save it to a file, import it") from None
    try:
        text = remove_indent("".join(lines).rstrip() + "\n")
        body = parse_module(text).body
    except SyntaxError:
        body, text = [], ""
    definition = body[0] if len(body) == 1 else None
    if not isinstance(definition, Definition):
        raise _refuse(name, "its source cannot be found. Import it again")
    if definition.decorator_list:
        decorators = ", ".join(f"@{ast.unparse(item)}" for item in definition.decorator_list)
        raise _refuse(name, f"it is decorated with {decorators}. Pass the function without that")
    return text, definition


def _check_definition(name: str, definition: Definition) -> None:
    """Raise ConfigurationError if variables cannot supply the parameters."""
    arguments = definition.args
    for star, item in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if item is not None:
            raise _refuse(name, f"it takes {star}{item.arg}. Name each of its parameters: they are the variables")
    if arguments.posonlyargs:
        raise _refuse(name, f"its parameter {arguments.posonlyargs[0].arg} is positional-only. Remove the / after it")
    for parameter in _list_names(definition):
        if parameter in PROVIDED_NAMES or parameter == definition.name:
            what = "the function" if parameter == definition.name else "a function or a constant that code finds"
            raise _refuse(name, f"its parameter {parameter} has the name of {what}. Rename it")
    if definition.name in PROVIDED_NAMES:
        raise _refuse(name, "it has the name of a function or constant that code already has. Rename it")


def _check_defaults(name: str, function: FunctionType, definition: Definition) -> None:
    """Raise ConfigurationError if a literal default in the source differs from the function's default."""
    positional, keywords = definition.args.args, definition.args.kwonlyargs
    defaults = function.__defaults__ or ()
    has_all = len(defaults) == len(definition.args.defaults)
    pairs = [*zip(definition.args.defaults, defaults, strict=False)]
    for parameter, node in zip(keywords, definition.args.kw_defaults, strict=True):
        has_all = has_all and (node is not None) == (parameter.arg in (function.__kwdefaults__ or {}))
        if node is not None and has_all:
            pairs.append((node, (function.__kwdefaults__ or {})[parameter.arg]))
    for node, value in pairs if has_all and len(positional) >= len(defaults) else ():
        try:
            written = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue  # the value of this expression at definition time is unknown
        has_all = has_all and repr(written) == repr(value)
    if not has_all:
        raise _refuse(name, "its source changed since it was imported. Import it again")


def _list_names(definition: Definition) -> list[str]:
    return [item.arg for item in (*definition.args.args, *definition.args.kwonlyargs)]


def _build_call(parameters: FunctionParameters, names: Collection[str]) -> str:
    """Return code that calls the function and passes each of the names that is defined."""
    required = [name for name in names if name in parameters.required]
    optional = [name for name in names if name not in parameters.required]
    lists = [json.dumps(part, ensure_ascii=False) for part in (required, optional)]
    call = f"await {parameters.function}" if parameters.is_async else parameters.function
    return CALL.format(call=call, required=lists[0], optional=lists[1])


def _is_compiled_from(function: FunctionType, text: str, definition: Definition, flags: int) -> bool:
    """Return True if the text compiles to the function's code, or if pytest has rewritten its asserts."""
    code = function.__code__
    if any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames)):
        return True
    # If a function and its module import the same name, CPython compiles the function's calls of it differently.
    imports = [node for node in ast.walk(definition) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names} - {"*"}
    imported = "".join(f"import {name}\n" for name in sorted(names & function.__globals__.keys()))
    try:
        modules = [compile(text + more, "<code>", "exec", flags, dont_inherit=True) for more in ("", imported)]
    except (SyntaxError, ValueError):
        return False
    constants = [item for module in modules for item in module.co_consts]
    return any(isinstance(item, CodeType) and _is_same_code(item, code) for item in constants)


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    def same_constant(first: Any, second: Any) -> bool:
        if isinstance(first, CodeType) and isinstance(second, CodeType):
            return _is_same_code(first, second)
        return type(first) is type(second) and (first == second or repr(first) == repr(second))

    names = ("co_name", "co_code", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount")
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(same_constant, one.co_consts, other.co_consts))
    )


def _find_foreign_global(text: str, own: Collection[str], function: FunctionType) -> str | None:
    """Return the first global name in the text that neither the text, the sandbox nor Python defines, or None."""
    used, assigned = dict[str, None](), set[str]()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            name = symbol.get_name()
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and symbol.is_referenced():
                used[name] = None
            if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
                assigned.add(name)
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(text, "<code>", "exec"))
    return next((name for name in used if name not in assigned and not _is_known(name, own, function)), None)


def _is_known(name: str, own: Collection[str], function: FunctionType) -> bool:
    missing = object()
    here = function.__globals__.get(name, missing)
    if name in own:
        return here is missing or name not in PROVIDED_NAMES  # a tool may have the name of a global of the module
    builtin = getattr(builtins, name, missing)
    # Notebooks wrap Python's `open`.
    return builtin is not missing and (here is missing or getattr(here, "__wrapped__", here) is builtin)


def _explain_global(name: str, function: FunctionType) -> str:
    """Return the reason why a global name is refused, with a remedy."""
    missing = object()
    value = function.__globals__.get(name, missing)
    if value is missing:
        return f"it uses {name}, which is undefined. Import it in the function, or make it a parameter"
    if isinstance(value, ModuleType):
        line = f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
        return f"it uses {name}, which is imported outside of it. Write `{line}` in the function"
    if name in PROVIDED_NAMES:
        return f"it uses {name} as its module defines it, and the sandbox has its own. Remove or rename the module's"
    origin = getattr(value, "__module__", None)
    if callable(value) and isinstance(origin, str) and origin not in ("__main__", function.__module__):
        return f"it uses {name}, which is imported outside of it. Write `from {origin} import {name}` in the function"
    if callable(value):
        return f"it uses {name}, which is defined outside of it. Define that in the function, or import it there"
    return f"it uses {name}, which is a global variable here. Make it a parameter, or define it in the function"
