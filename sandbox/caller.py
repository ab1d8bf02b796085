"""The caller: messages name options on the command line, and parameters in Python."""

import os
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

OPTIONS_BY_PARAMETER = {
    "cache_results": "resume",
    "objective": "minimize",
    "secrets": "secret",
}  # Options whose name differs from the parameter's name.
VALUES_BY_PARAMETER = {"grid": ("=VALUE,VALUE", "[...]"), "space": ("=LOW..HIGH", '{"low": ..., "high": ...}')}


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller's way of passing parameters, for messages that say what to pass.

    Args:
        is_command: The caller typed a command, so parameters are options.
        is_flow: The code runs in a flow, so a provider's settings are in `provider_options`.
        variables_source: The parameter that sets the variables of an execution; empty if there is none.
        code_directories: The directories of the code's files; by default the directory of the running program.
        workers: The number of executions at the same time.
    """

    is_command: bool = False
    is_flow: bool = False
    variables_source: str = "variables"
    code_directories: tuple[str, ...] = ()
    workers: int = 1


_program = Caller()  # The caller where the context has none, for example in new threads.
_current: ContextVar[Caller | None] = ContextVar("rlm_batch_caller", default=None)


def get_caller() -> Caller:
    """Return the caller of the running code."""
    return _current.get() or _program


@contextmanager
def use_options(*code_directories: str) -> Generator[None]:
    """Treat this process as a command until the context ends, so messages name options."""
    global _program
    previous, _program = _program, replace(_program, is_command=True, code_directories=code_directories)
    try:
        yield
    finally:
        _program = previous


@contextmanager
def use_flow(variables_source: str, workers: int = 1) -> Generator[None]:
    """Treat the running code as part of a flow until the context ends. See `Caller` for the arguments."""
    token = _current.set(replace(_program, is_flow=True, variables_source=variables_source, workers=workers))
    try:
        yield
    finally:
        _current.reset(token)


def name_parameter(name: str) -> str:
    """Return a parameter's name as the caller writes it: `max_workers`, or `--max-workers` in a command."""
    if not get_caller().is_command:
        return name
    return f"--{OPTIONS_BY_PARAMETER.get(name, name).replace('_', '-')}"


def describe_setting(name: str, *values: str) -> str:
    """Return the text that adds values to a list setting of a provider, such as `packages`."""
    caller = get_caller()
    if caller.is_command:
        return f"{name_parameter(name)} {shlex.quote(','.join(values))}"
    setting = {name: [*values]}
    return f"provider_options={setting}" if caller.is_flow else f"{name}={[*values]}"


def describe_variable(name: str) -> str:
    """Return how the caller passes a variable to an execution; empty if executions get none."""
    caller = get_caller()
    source = caller.variables_source
    if not source:
        return ""
    option_value, value = VALUES_BY_PARAMETER.get(source, ("", "..."))
    if caller.is_command:
        option = name_parameter(source)
        if option_value:
            return f"{option} {name}{option_value}"
        # The shell replaces a pattern of files that has no quotes.
        files = f", or {option} 'PATTERN' in quotes (for the path of each file)" if name == "path" else ""
        return f"{option} FILE (a file with a column {name}){files}"
    variables = f'{{"{name}": {value}}}'
    return f"{source}={variables}" if option_value or source == "variables" else f"{source}=[{variables}, ...]"


def list_code_directories() -> list[str]:
    """Return the directories of the caller's code."""
    main: Any = sys.modules.get("__main__")
    own = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "FILE"))
    return list(dict.fromkeys(get_caller().code_directories or (own,)))
