"""The batch flow: many pieces of code, or one piece over many inputs, each in a sandbox."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from prefect import get_run_logger
from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..sandbox.result import Outcome
from .decorator import batch_flow
from .engine.execution_labels import execution_label
from .engine.failures import raise_failures
from .engine.job import execute_items, locate_run_ledger
from .inputs.conversion import Code, Items, PathText, Variables
from .inputs.readers import (
    Inputs,
    TypesOfColumns,
    check_variables,
    get_column_types,
    read_inputs,
    resolve_types_of,
)
from .inputs.spilling import check_codes, read_code_reference, read_codes
from .inputs.tables import Report
from .parameters import Options, SharedParameters, Types


@batch_flow("batch")
async def batch(
    code: Annotated[Items[Code] | Code, Field(description="Pieces of Python code; or one piece, with inputs")],
    inputs: Annotated[
        Items[Variables] | PathText | None,
        Field(description="Variables for each execution of one piece of code, or a path to JSON lines, CSV or Parquet"),
    ] = None,
    types: Types = None,
    **parameters: Unpack[SharedParameters],
) -> Sequence[Outcome]:
    """Runs each piece of code in a sandbox, and returns their results in order.

    `code` is a list of texts; or one text with `inputs`, a list of variables or a path to JSON lines, CSV or Parquet,
    and the text runs once for each. In the place of a text Python callers may pass a function, whose source is sent:
    its parameters are the variables, and what it returns is submitted. docs/reference.md says what the parameters mean.

    Raises ExecutionsFailed when all are done and some failed (with `on_failure="return"` a `Failure` stands in their
    place), and ConfigurationError before anything runs.
    """
    options = Options.from_parameters(parameters)
    how = resolve_types_of(inputs, types, locate_run_ledger(options))  # type: ignore[arg-type]  # lists and text by now
    items = executions(code, inputs, how, get_run_logger().info)  # type: ignore[arg-type]
    needs_all = options.prepare is None
    if items.inputs is not None:
        check_variables(items.codes[0], items.inputs, needs_all=needs_all)
    for item in items.codes if items.inputs is None else ():
        check_variables(item, [()], needs_all=needs_all)
    outcomes = await execute_items(
        items, total=len(items), options=options, label=execution_label, column_types=get_column_types(items.inputs)
    )
    if options.on_failure == "raise":
        raise_failures(outcomes, "executions")
    return outcomes.results


@dataclass(frozen=True, slots=True)
class _Items(Sized, Iterable[tuple[str, dict[str, Any]]]):
    """Pairs of code and variables, made as they are asked for."""

    codes: list[str]
    inputs: Inputs | None

    def __len__(self) -> int:
        return len(self.codes) if self.inputs is None else len(self.inputs)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.inputs is None:
            return ((code, {}) for code in self.codes)
        return ((self.codes[0], variables) for variables in self.inputs)


def executions(
    code: list[str] | str,
    inputs: list[dict[str, Any]] | str | None,
    types: TypesOfColumns = None,
    report: Report | None = None,
) -> _Items:
    """The pairs of code and variables that these parameters stand for. Raises ConfigurationError."""
    if inputs is None and types is not None:
        raise ConfigurationError("types are those of a CSV file of inputs, and there is none: leave them out")
    if isinstance(code, list):
        if inputs is not None:
            raise ConfigurationError("inputs go with one piece of code: pass code as one text, not as a list")
        if not code:
            raise ConfigurationError("the list of code is empty: there is nothing to run")
        check_codes("code", code)
        return _Items(read_codes(code), None)
    found = read_code_reference(code)
    if isinstance(found, list):
        return _Items(found, None)
    return _Items([found], None if inputs is None else read_inputs(inputs, types, report))
