"""A reader of a flow run's ledger, also while the run is running. It needs no server, and little memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...blocks.storage.location import Location, PathOrLocation, list_names
from ...blocks.storage.location_parsing import is_remote, parse_location
from ...sandbox.errors import ConfigurationError
from ...sandbox.result import Outcome
from ...tasks.execution import with_index
from ...tasks.ledger.ledger import Ledger
from ...tasks.ledger.ledger_line import LedgerLine, LinePosition, count_usage, read_line
from ...tasks.ledger.result_index import get_results_root
from ...tasks.ledger.run_record import ReportSpec, RunRecord, list_run_records, read_known_runs
from ...tasks.repeats import Repeats, locate_execution
from .groups import group_outcomes
from .summary import RunSummary


class _LineSummary(NamedTuple):
    """The parts of a ledger's line that are kept in memory."""

    is_success: bool
    written_at: float
    number: int | None
    is_reduction: bool
    position: LinePosition


@dataclass(frozen=True, slots=True)
class LedgerReader:
    """A ledger's runs and outcomes."""

    ledger: Ledger
    records: list[RunRecord]  # the latest last; never empty
    asked_for: str | None = None  # the name of the run that the caller named; None if the caller named a path
    by: str | Sequence[str] | None = None  # the variables whose values name a row; None: each execution has a row

    @property
    def spec(self) -> ReportSpec:
        """The settings of the report."""
        return self.records[-1].report_spec.group_by(self.by)

    @property
    def note(self) -> str:
        """A sentence if the caller named a run whose results a later run has replaced; otherwise empty."""
        name, last = self.asked_for, self.records[-1].name
        if name is None or name == last:
            return ""
        return f"{last} has written to the results of {name} since: these are the results of {last}"

    def read_outcomes(self, *, with_reduction: bool = False) -> Iterator[Outcome]:
        """Yield the outcome that counts for each execution in the order of their numbers, and then the reduction's.

        For the same code and variables, the latest success counts, or else the latest failure. If changed code ran
        under the same number, the latest outcome counts. Executions of `run_code` have no number. They come last, in
        order of time, and get the next numbers.
        """
        positions = self._find_positions()
        for number in sorted(positions):
            line = read_line(positions[number])
            is_reduction = line is not None and self._is_reduction(line)
            if line is not None and (with_reduction or not is_reduction):
                place = locate_execution(self._repeats, number)
                yield with_index(line.to_outcome(), number, place, is_reduction=is_reduction)

    def read_rows(self) -> Iterator[Outcome]:
        """Yield the outcome of each execution, or with `by` of each input. All executions of an input take memory."""
        return group_outcomes(self.read_outcomes(), self.spec) if self.by else self.read_outcomes()

    def find_outcome(self, number: int) -> Outcome:
        """Return the outcome of the execution with this number. Raises ConfigurationError if it is missing."""
        for outcome in self.read_outcomes(with_reduction=True):
            if outcome.meta.index == number:
                return outcome
        path = self.ledger.path
        raise ConfigurationError(f"{path} has no outcome of execution {number}: rlm-batch report {path} lists them")

    @property
    def _repeats(self) -> Repeats | None:
        """The repeats of the last run."""
        return self.records[-1].report_spec.repeats

    def _find_number(self, line: LedgerLine) -> int | None:
        """Return the execution's number in the last run. An earlier run may have had fewer repeats, or none."""
        number, group, repeats = line.data.get("index"), line.data["meta"].get("group"), self._repeats
        if repeats is None:
            return number if group is None else group
        if group is not None:
            return group * repeats.count + line.data["meta"].get("repeat", 0)
        if number is None:  # `run_code` wrote the line.
            return None
        return number * repeats.count  # A run without repeats wrote the line, so its number is that of a group.

    def _is_reduction(self, line: LedgerLine) -> bool:
        """Return whether the line has the outcome of a reduction. Earlier versions did not mark that of chunks."""
        meta = line.data["meta"]
        is_of_chunks = self.records[-1].flow == "rlm-chunks" and "chunk_id" not in meta.get("variables", {})
        return meta.get("is_reduction", False) or is_of_chunks

    @property
    def _has_reduction(self) -> bool:
        """Return whether the last run had a reduction; one of an earlier run may not have read all outcomes."""
        origin = self.records[-1].origin
        return origin is None or "reduce" in origin.code or "summarize" in origin.code

    def _is_in_run(self, line: LedgerLine) -> bool:
        """Return whether the last run has the line's group and repeat. An earlier run may have had more of them."""
        group, repeat = line.data["meta"].get("group", 0), line.data["meta"].get("repeat", 0)
        if self._repeats is None:
            return repeat == 0
        return group < self._repeats.groups and repeat < self._repeats.count

    def _find_positions(self) -> dict[int, LinePosition]:
        """Return the line that counts for each execution, by its number."""
        by_key: dict[str, _LineSummary] = {}
        for line in self.ledger.read_lines():
            if self._is_in_run(line):
                number, is_reduction = self._find_number(line), self._is_reduction(line)
                summary = _LineSummary(line.is_success, line.written_at, number, is_reduction, line.position)
                earlier = by_key.get(line.key)
                if earlier is None or summary[:2] >= earlier[:2]:
                    by_key[line.key] = summary
        positions: dict[int, LinePosition] = {}
        unnumbered: list[LinePosition] = []
        reductions: list[LinePosition] = []
        for summary in sorted(by_key.values(), key=lambda summary: summary.written_at):
            if summary.is_reduction:
                reductions = [summary.position] if self._has_reduction else []  # The latest counts.
            elif summary.number is None:
                unnumbered.append(summary.position)
            else:
                positions[summary.number] = summary.position
        first = max(positions, default=-1) + 1
        return positions | dict(enumerate([*unnumbered, *reductions], first))

    def summarize(self) -> RunSummary:
        """Return the summary of the outcomes."""
        summary = RunSummary.from_outcomes(self.read_outcomes(with_reduction=True), self.spec)
        summary.total_usage = count_usage(self.ledger.list_parts())
        return summary


def open_run_ledger(
    run: str, locate: Callable[[PathOrLocation | str], PathOrLocation] = parse_location
) -> LedgerReader:
    """Return the ledger of a run.

    `run` is a path or a location, or the beginning of the run's id or name. `locate` returns the ledger at a path or a
    location, or refuses it before anything there is read.

    Raises:
        ConfigurationError: There is no such ledger, or it cannot be read.
    """
    path, name = _find_ledger(run, locate)
    try:
        if not list_names(path, "part-*.jsonl") and not list_names(path, "run-*.json"):
            raise ConfigurationError(f"{path} has no results: name a run's results, which the run prints at its end")
        records = list_run_records(path) or [RunRecord("run", str(path), name=path.name)]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    return LedgerReader(Ledger(path), records, name)


def find_last_run() -> RunRecord:
    """Return the run of this machine that began last.

    Raises:
        ConfigurationError: There is no run.
    """
    known = read_known_runs(get_results_root())
    if not known.records:
        raise ConfigurationError(f"there is no run in {known.root}: name the path of a run's results")
    return known.records[0]


def _find_ledger(
    run: str, locate: Callable[[PathOrLocation | str], PathOrLocation]
) -> tuple[PathOrLocation, str | None]:
    """Return a ledger, and the name of its run if `run` is not a path."""
    path = locate(run) if os.sep in run else parse_location(run)
    is_folder = not isinstance(path, Location) and run.strip() and path.is_dir()
    if isinstance(path, Location) or is_remote(run) or is_folder:
        return locate(path), None
    record = read_known_runs(get_results_root()).find(run)
    is_path = os.sep in run or run == Path(record.results_path).name
    return locate(record.results_path), None if is_path else record.name
