"""The variables that a function gets which was passed as code, held to its parameters before anything runs."""

from collections.abc import Iterable

from ...sandbox.requests.function_code import find_parameters
from .readers import InputFile


def check_variables(code: str, inputs: Iterable[Iterable[str]], *, needs_all: bool) -> None:
    """Returns if the function that the code was made of takes the variables of each input; so does any other code.

    `needs_all` says that nothing but the inputs could define a parameter without a default, as `prepare` could. Raises
    ConfigurationError.
    """
    parameters = find_parameters(code)
    if parameters is None:
        return
    if isinstance(inputs, InputFile) and inputs.table is not None:
        inputs = [inputs.table.names]  # all its rows have the same
    for variables in inputs:
        parameters.check(variables, needs_all=needs_all)


def check_provided_variables(code: str | None, names: tuple[str, ...], *, needs_all: bool) -> None:
    """The same where a flow provides the variables, which a function need not take."""
    parameters = None if code is None else find_parameters(code)
    if parameters is not None:
        parameters.check((name for name in names if name in parameters.names), needs_all=needs_all)
