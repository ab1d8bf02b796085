"""The plan of one flow run. It is made and checked without Prefect, before anything runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.result import Failure, Outcome, Result
from ..tasks.execution import Execution, FindUploads
from ..tasks.ledger.run_record import ReportSpec
from ..tasks.repeats import Item, RepeatedItems
from .inputs.readers import RuleOfTypes
from .parameters import Options
from .reporting.table import format_variables

if TYPE_CHECKING:
    from ..sandbox.queries.recursive_model import RecursionSettings
    from .engine.run import Run


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Every execution's outcome, in order, the path of the ledger, and the plan's spec if it is known."""

    results: Sequence[Outcome]
    failures: Sequence[Failure]  # The final failures among the results.
    results_path: str
    spec: ReportSpec | None = None


@dataclass(frozen=True, slots=True)
class CodeForEach:
    """One piece of code with each of many inputs. It can be read again, for a flow run that Prefect retries."""

    code: str
    inputs: Iterable[dict[str, Any]]

    def __iter__(self) -> Iterator[Item]:
        return ((self.code, variables) for variables in self.inputs)


def repeat_items(items: Iterable[Item], spec: ReportSpec, options: Options) -> Iterable[Item]:
    """Return each item as often as the spec says, with the number of the repeat where the code reads it."""
    if spec.repeats is None:
        return items
    return RepeatedItems(items, spec.repeats.count, options.preparation and options.preparation.code)


def count_executions(count: int, spec: ReportSpec) -> int:
    """Return the number of executions of so many items."""
    return count if spec.repeats is None else spec.repeats.total


Label = Callable[[Execution], str]
MAX_LABEL_CHARACTERS = 120  # characters of the part of a label that distinguishes executions


def execution_label(execution: Execution) -> str:
    """Return a label with the execution's number."""
    return f"execution {execution.index}"


def trial_label(execution: Execution) -> str:
    """Return a label with the trial's number and the values of its variables."""
    return f"trial {execution.index}: {_cut(format_variables(execution.variables))}"


def step_label(execution: Execution) -> str:
    """Return a label with the step's number."""
    return f"step {execution.index}"


def chunk_label(execution: Execution) -> str:
    """Return a label with the chunk's id, or "reduce" for the execution without a chunk."""
    if "chunk_id" not in execution.variables:
        return "reduce"
    return f"chunk {_cut(escape_text(execution.variables['chunk_id']))}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LABEL_CHARACTERS else f"{text[: MAX_LABEL_CHARACTERS - 3]}..."


LABELS = {"execution": execution_label, "trial": trial_label, "chunk": chunk_label}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one flow run: its executions, and what only their flow knows.

    Args:
        total: The number of executions.
        items: The code and the variables of each execution. They are read again if Prefect retries the flow run.
        execute: Executes the items in an open run; by default all of them in any order.
        label: Names an execution's task run.
        report_spec: The report's word for an execution, and its objectives.
        runs_each_code: Each execution runs a different piece of code, so a table can name the pieces.
        find_uploads: Returns the files of an execution, by their paths in the sandbox; None if there are no files.
        digests: The digest of each execution's file, by the variable `path`; None if the inputs are no files.
        state_context: With a name, all executions share one process and its state.
        stop_on_failure: Start no execution after one that failed.
        recursion: The settings of recursive models, if each execution is one recursive query; otherwise None.
        on_turn: Function of the host that takes each turn of a recursive model, as `name_function` names it; or None.
        check_first: Checks the first result with fields. A ConfigurationError that it raises ends the run.
        search: The settings of a search, for the run's record; empty if there is none.
        may_stop_early: The run may end before all executions have run.
        warnings: Sentences for people, before the first execution.
        column_types: The rule by which a CSV file's cells were read, for the run's record.
    """

    total: int
    items: Iterable[Item] = ()
    execute: Callable[[Run], Awaitable[None]] | None = None
    label: Label = execution_label
    report_spec: ReportSpec = field(default_factory=ReportSpec)
    runs_each_code: bool = False
    find_uploads: FindUploads | None = None
    digests: Mapping[str, str] | None = None
    state_context: str | None = None
    stop_on_failure: bool = False
    recursion: RecursionSettings | None = None
    on_turn: Any = None
    check_first: Callable[[Result], None] | None = None
    search: dict[str, Any] = field(default_factory=dict[str, Any])
    may_stop_early: bool = False
    warnings: tuple[str, ...] = ()
    column_types: RuleOfTypes = field(default_factory=dict[str, Any])
