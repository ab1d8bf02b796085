"""The plan of one flow run. It is made and checked without Prefect, before anything runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.result import Failure, Outcome, Result
from ..tasks.execution import Execution, FindUploads
from ..tasks.ledger.run_record import ReportSpec
from ..tasks.repeats import Item, RepeatedItems
from .reporting.table import format_variables

if TYPE_CHECKING:
    from ..sandbox.queries.recursive_model import RecursionSettings
    from .engine.run import Run


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of a flow run, from which its report is built."""

    results: Sequence[Outcome]  # all outcomes, in order
    failures: Sequence[Failure]  # the failures among them
    results_path: str
    spec: ReportSpec

    def split(self) -> tuple[Sequence[Outcome], Outcome | None]:
        """Return the outcomes of the executions, and that of the reduction, which is the last one if there is one."""
        if self.results and self.results[-1].meta.is_reduction:
            return self.results[:-1], self.results[-1]
        return self.results, None


@dataclass(frozen=True, slots=True)
class CodeForEach:
    """One piece of code with each of many inputs. It can be iterated again, for a flow run that Prefect retries."""

    code: str
    inputs: Iterable[dict[str, Any]]

    def __iter__(self) -> Iterator[Item]:
        return ((self.code, variables) for variables in self.inputs)


Label = Callable[[Execution], str]
MAX_LABEL_CHARACTERS = 130


def label_execution(noun: str, execution: Execution) -> str:
    """Return an execution's label: its number, for a trial also its variables, and for a chunk the chunk's id."""
    text = f"{noun} {execution.index}"
    if execution.is_reduction:
        text = "reduce" if noun == "chunk" else "summarize"
    elif noun == "trial":
        text += f": {format_variables(execution.variables)}"
    elif noun == "chunk":
        text = f"chunk {escape_text(execution.variables['chunk_id'])}"
    if len(text) > MAX_LABEL_CHARACTERS:
        text = f"{text[: MAX_LABEL_CHARACTERS - 3]}..."
    return text


LABEL: Label = partial(label_execution, "execution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one flow run: its executions, and settings that only some flows need."""

    total: int
    items: Iterable[Item] = ()  # iterated again if Prefect retries the flow run
    execute: Callable[[Run], Awaitable[None]] | None = None  # None: execute all items in any order
    label: Label = LABEL  # names an execution's task run
    report_spec: ReportSpec = field(default_factory=ReportSpec)
    runs_each_code: bool = False  # Each execution runs another piece of code, so a table can name the pieces.
    find_uploads: FindUploads | None = None  # returns the files of an execution, by their paths in the sandbox
    digests: Mapping[str, str] | None = None  # the digest of each execution's file, by the variable `path`
    state_context: str | None = None  # With a name, all executions share one process and its state.
    stop_on_failure: bool = False  # Start no execution after one that failed.
    recursion: RecursionSettings | None = None  # set if each execution is one recursive query
    on_turn: Any = None  # function that takes each turn of a recursive model, as `name_function` names it
    check_first: Callable[[Result], None] | None = None  # A ConfigurationError about the first result ends the run.
    search: dict[str, Any] = field(default_factory=dict[str, Any])  # the settings of a search, for the run's record
    may_stop_early: bool = False
    judged_run: str = ""  # the ledger of the run that a check judges again


def plan_items(items: Iterable[Item], count: int, spec: ReportSpec, **settings: Any) -> Plan:
    """Return the plan of `count` items, which run several times if the spec has repeats.

    `settings` are further fields of the plan. Code with the name `repeat` gets the number of the repeat.
    """
    if spec.repeats is not None:
        items = RepeatedItems(items, spec.repeats.count)
        count = spec.repeats.total
    return Plan(total=count, items=items, report_spec=spec, **settings)
