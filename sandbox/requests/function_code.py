"""Conversion of a function to code: its source, and a call that passes the variables and submits the return value.

Only the source is sent to the sandbox, so every name in it must exist there.
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
    """The parameters of a converted function.

    Attributes:
        function: Name of the function.
        names: Names of all parameters.
        required: Names of the parameters without a default.
        is_async: True if the function is a coroutine function.
    """

    function: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    is_async: bool = False

    def check(self, variables: Iterable[str], *, needs_all: bool) -> None:
        """Raise ConfigurationError for a variable that is not a parameter.

        With `needs_all`, also raise it for a required parameter without a variable.
        """
        names = set(variables)
        unknown = sorted(names.difference(self.names))
        if unknown:
            known = ", ".join(self.names) or "none"
            raise ConfigurationError(
                f"{self.function}() has no parameter for the variable {unknown[0]!r}: it has {known}"
            )
        missing = [name for name in self.required if name not in names]
        if needs_all and missing:
            raise ConfigurationError(
                f"{self.function}() needs a value for {missing[0]!r}: pass a variable of that name, or "
                "give it a default"
            )


def convert_code(code: Any, tools: Collection[str] = (), variables: Collection[str] | None = None) -> Any:
    """Return code that defines a function, calls it and submits its return value. Return a text unchanged.

    The variables are the arguments. A parameter without a variable takes its default, or a global of earlier code.
    A returned dict is submitted as fields, any other value as `output`, and None not at all. An async function is
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
    if not isinstance(code, str) or not code.endswith(CALL_END):
        return None
    call = CALL_PATTERN.search(code)
    if call is None:
        return None
    required = tuple(re.findall(r"\w+", call["required"]))
    optional = tuple(re.findall(r"\w+", call["optional"]))
    parameters = FunctionParameters(call["name"], (*required, *optional), required, call["await"] is not None)
    is_built = code.endswith(_build_call(parameters, parameters.names))  # A person's code may resemble our call.
    return parameters if is_built else None


def _build_definition(function: Callable[..., Any], tools: Collection[str]) -> tuple[str, FunctionParameters]:
    """Return the source of the function, and its parameters. Raises ConfigurationError."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    plain = _check_kind(name, function)
    text = _read_source(name, plain)
    parameters = inspect.signature(plain).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _refuse(name, f"its parameter {parameter} is no variable. Name each parameter, without * and /")
    own_names = [plain.__name__, *parameters]
    for own_name in own_names:
        if own_name in PROVIDED_NAMES or own_names.count(own_name) > 1:
            raise _refuse(name, f"{own_name} is the name of a function that code finds. Rename it")
    provided = {plain.__name__, *PROVIDED_NAMES, *tools}
    is_deferred = bool(plain.__code__.co_flags & __future__.annotations.compiler_flag)
    hides_builtin = any(hasattr(builtins, parameter) for parameter in parameters)
    # With deferred annotations, these may use a hidden builtin or a name that the sandbox does not have.
    if is_deferred or hides_builtin or _find_foreign_global(text, provided, plain) is not None:
        text = FUTURE_LINE + text
        foreign = _find_foreign_global(text, provided, plain)
        if foreign is not None:
            raise _refuse(name, _explain_global(foreign, plain))
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    optional = [name for name in parameters if name not in required]
    return text, FunctionParameters(
        plain.__name__, (*required, *optional), tuple(required), inspect.iscoroutinefunction(plain)
    )


def _refuse(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(f"the function {name} cannot be sent to a sandbox: {reason}")


def _check_kind(name: str, function: Any) -> FunctionType:
    """Return the function. Raises ConfigurationError if it is not a plain function."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        kind = add_article(type(function).__name__)
        raise _refuse(name, f"it is {kind}, or decorated. Pass a plain function, without decorators")
    if function.__code__.co_name == "<lambda>":
        raise _refuse(name, "it is a lambda. Write it with def")
    if function.__code__.co_freevars:
        outer = ", ".join(function.__code__.co_freevars)
        raise _refuse(name, f"it is a closure: it uses {outer} of the function around it. Make that a parameter")
    return function


def _read_source(name: str, function: FunctionType) -> str:
    """Return the source without its indent, with one final newline. Raises ConfigurationError."""
    try:
        lines, _ = inspect.getsourcelines(function)
        text = remove_indent("".join(lines).rstrip() + "\n")
        statements = parse_module(text).body
    except (OSError, TypeError, SyntaxError):
        text, statements = "", []
    match statements:
        case [ast.FunctionDef() | ast.AsyncFunctionDef() as definition] if definition.name == function.__name__:
            if definition.decorator_list:
                raise _refuse(name, "it is decorated. Pass a plain function, without decorators")
            return text
        case _:
            raise _refuse(
                name, "its source is unknown, or changed since it was imported. Save it to a file, and import it"
            )


def _build_call(parameters: FunctionParameters, names: Collection[str]) -> str:
    """Return code that calls the function and passes each of the names that is defined."""
    required = [name for name in names if name in parameters.required]
    optional = [name for name in names if name not in parameters.required]
    return CALL.format(
        call=f"await {parameters.function}" if parameters.is_async else parameters.function,
        required=json.dumps(required, ensure_ascii=False),
        optional=json.dumps(optional, ensure_ascii=False),
    )


def _find_foreign_global(text: str, provided: Collection[str], function: FunctionType) -> str | None:
    """Return the first global name in the text that neither the text, the sandbox nor Python defines, or None."""
    used_names: list[str] = []
    assigned_names: set[str] = set()
    tables = [symtable.symtable(text, "<code>", "exec")]
    while tables:
        table = tables.pop(0)
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and symbol.is_referenced():
                used_names.append(symbol.get_name())
            if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
                assigned_names.add(symbol.get_name())
    for name in used_names:
        if name not in assigned_names and not _is_known(name, provided, function):
            return name
    return None


def _is_known(name: str, provided: Collection[str], function: FunctionType) -> bool:
    """Return True if a global name means the same in the sandbox: it is `provided` there, or one of Python's names."""
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
        line = f"import {value.__name__}"
        if value.__name__ != name:
            line += f" as {name}"
        return f"it uses {name}, which is imported outside of it. Write `{line}` in the function"
    return f"it uses {name}, which it does not define. Define or import it in the function, or make it a parameter"
