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
from types import FunctionType, ModuleType
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
    text = _read_source(name, plain)
    parameters = inspect.signature(plain).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _refuse(name, f"its parameter {parameter} is no variable. Name each parameter, without * and /")
    taken = [own for own in (plain.__name__, *parameters) if own in PROVIDED_NAMES]
    if taken or plain.__name__ in parameters:
        raise _refuse(name, f"{(taken or [plain.__name__])[0]} is the name of a function that code finds. Rename it")
    # Defer annotations also if a parameter hides a builtin, because annotations may use that builtin.
    is_waiting = bool(plain.__code__.co_flags & __future__.annotations.compiler_flag)
    is_waiting = is_waiting or any(hasattr(builtins, parameter) for parameter in parameters)
    provided = {plain.__name__, *PROVIDED_NAMES, *tools}
    foreign = _find_foreign_global(FUTURE_LINE + text if is_waiting else text, provided, plain)
    if foreign is not None and not is_waiting:  # the name may occur only in annotations, which can be deferred
        is_waiting, foreign = True, _find_foreign_global(FUTURE_LINE + text, provided, plain)
    if foreign is not None:
        raise _refuse(name, _explain_global(foreign, plain))
    if is_waiting:
        text = FUTURE_LINE + text
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    optional = [name for name in parameters if name not in required]
    return text, FunctionParameters(
        plain.__name__, (*required, *optional), tuple(required), inspect.iscoroutinefunction(plain)
    )


def _refuse(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"the function {name} cannot be sent to a sandbox: {reason}")


def _check_kind(function: Any) -> tuple[str, FunctionType]:
    """Return the function's name, and the function. Raises ConfigurationError if it is not a plain function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        kind = add_article(type(function).__name__)
        raise _refuse(name, f"it is {kind}, or decorated. Pass a plain function, without decorators")
    if function.__code__.co_name == "<lambda>":
        raise _refuse(name, "it is a lambda. Write it with def")
    if function.__code__.co_freevars:
        outer = ", ".join(function.__code__.co_freevars)
        raise _refuse(name, f"it is a closure: it uses {outer} of the function around it. Make that a parameter")
    return name, function


def _read_source(name: str, function: FunctionType) -> str:
    """Return the dedented source with one final newline. Raises ConfigurationError."""
    try:
        lines, _ = inspect.getsourcelines(function)
        text = remove_indent("".join(lines).rstrip() + "\n")
        body = parse_module(text).body
    except (OSError, TypeError, SyntaxError):
        body, text = [], ""
    definition = body[0] if len(body) == 1 else None
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) or definition.name != function.__name__:
        raise _refuse(name, "its source is unknown, or changed since it was imported. Save it to a file, and import it")
    if definition.decorator_list:
        raise _refuse(name, "it is decorated. Pass a plain function, without decorators")
    return text


def _build_call(parameters: FunctionParameters, names: Collection[str]) -> str:
    """Return code that calls the function and passes each of the names that is defined."""
    required = [name for name in names if name in parameters.required]
    optional = [name for name in names if name not in parameters.required]
    lists = [json.dumps(part, ensure_ascii=False) for part in (required, optional)]
    call = f"await {parameters.function}" if parameters.is_async else parameters.function
    return CALL.format(call=call, required=lists[0], optional=lists[1])


def _find_foreign_global(text: str, provided: Collection[str], function: FunctionType) -> str | None:
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
    return next((name for name in used if name not in assigned and not _is_known(name, provided, function)), None)


def _is_known(name: str, provided: Collection[str], function: FunctionType) -> bool:
    """Return whether a global name means the same in the sandbox: it is `provided` there, or one of Python's names."""
    missing = object()
    value = function.__globals__.get(name, missing)
    if name in provided:
        return value is missing or name not in PROVIDED_NAMES  # A tool may have the name of a global of the module.
    builtin = getattr(builtins, name, missing)
    # Notebooks wrap Python's `open`.
    return builtin is not missing and (value is missing or getattr(value, "__wrapped__", value) is builtin)


def _explain_global(name: str, function: FunctionType) -> str:
    """Return the reason why a global name is refused, with a remedy."""
    value = function.__globals__.get(name)
    if isinstance(value, ModuleType):
        line = f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
        return f"it uses {name}, which is imported outside of it. Write `{line}` in the function"
    return f"it uses {name}, which it does not define. Define or import it in the function, or make it a parameter"
