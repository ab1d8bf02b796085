"""Lines of a ledger: their contents, their encoding and parsing, and their positions.

Most lines are outcomes of executions. A search adds a line with a trial's point before the trial runs, and a line for
each report with the pruner's decision. A recursive query adds a line for each turn when it ends. Readers of outcomes
skip these other lines.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta, QuerySummary
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json, restore_outcome
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Outcome, Result

if TYPE_CHECKING:
    from ...sandbox.queries.records import RlmEvent
    from ..execution import Execution

VERSION = 1  # the version of the format of ledger lines, run records and the files of shards
MAX_LINE_BYTES = 256 * 1024 * 1024  # rlm-batch writes no longer line
WrittenAt = Annotated[float, Field(validation_alias="at")]
QUERIES, USAGE = TypeAdapter(QuerySummary), TypeAdapter(Usage)
MAX_NUMBER = 1e15  # rlm-batch writes no larger times, sizes and counts
NUMBER_TYPES = (int, float, int | None, float | None)
NUMBER_FIELDS = [item.name for item in fields(Meta) + fields(QuerySummary) if item.type in NUMBER_TYPES]
NUMBER_NAMES = {"at", *NUMBER_FIELDS}


class ErrorFields(BaseModel):
    """The error of a failure."""

    error: str
    text: str


class LineFields(BaseModel):
    """The line of an outcome. A success has outputs, and a failure has an error."""

    key: str
    at: float
    meta: Meta
    unchecked_key: str = ""
    index: Annotated[int, Field(ge=0)] | None = None
    outputs: dict[str, Any] = {}
    error: ErrorFields | None = None


class LinePosition(NamedTuple):
    """The place of a line: its part's path, and its offset and length in bytes."""

    part: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the next line."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The line of an outcome, read from a ledger."""

    key: str
    written_at: float  # epoch seconds
    is_success: bool
    data: dict[str, Any]
    position: LinePosition  # For a ledger at a location, in a local copy that is deleted with its `Ledger` object.

    @property
    def ended_key(self) -> str:
        """The key by which a check finds the execution's own outcome; empty if the execution has to run again."""
        if self.data["meta"].get("judged") is not None:
            return self.data.get("unchecked_key", "")
        return self.key if self.is_success else ""

    def to_outcome(self) -> Outcome:
        """Return the result or the failure that the line holds."""
        return outcome_from_json(self.data)


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """The point of a trial."""

    key: str
    index: int  # the number of the trial
    variables: dict[str, Any]
    alternative: int  # the number of the space's alternative to which the variables belong
    search: str  # a digest of the space, the code, and the fingerprint in the keys of the search's trials
    written_at: WrittenAt = 0.0


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A value that a trial has reported, and whether the trial was pruned at this report."""

    key: str
    index: int
    step: int
    value: float  # infinity is a text in the line
    is_pruned: Annotated[bool, Field(validation_alias="pruned")]
    written_at: WrittenAt = 0.0


SearchLine = AskedTrial | TrialReport | LedgerLine
Forms = Mapping[str, TypeAdapter[Any]]  # the type of a line by its status
TRIAL_FORMS: Forms = {"asked": TypeAdapter(AskedTrial), "reported": TypeAdapter(TrialReport)}


def check_version(data: Any, path: object) -> None:
    """Raise ConfigurationError for data of a newer version of rlm-batch, and ValueError for data without a version."""
    version = data.get("version") if isinstance(data, dict) else None  # type: ignore[reportUnknownMemberType]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError("no version")
    if version > VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer version of rlm-batch (format {version!r}, this version reads "
            f"{VERSION}): upgrade rlm-batch, or move the file away"
        )


def encode_line(key: str, outcome: Outcome, unchecked_key: str = "") -> bytes:
    """Return the line of an outcome. A judged one has `unchecked_key`, by which another check finds it."""
    status = "succeeded" if isinstance(outcome, Result) else "failed"
    start = {"index": outcome.meta.index, "attempt": outcome.meta.attempt, "status": status}
    if unchecked_key and outcome.meta.judged is not None:
        start["unchecked_key"] = unchecked_key
    return encode_fields(key, {**start, **outcome_to_json(outcome)})


def encode_asked_trial(trial: AskedTrial) -> bytes:
    """Return the line of a trial that is about to run."""
    fields = {name: getattr(trial, name) for name in ("index", "variables", "alternative", "search")}
    return encode_fields(trial.key, {**fields, "status": "asked"})


def encode_trial_report(report: TrialReport) -> bytes:
    """Return the line of a trial's report."""
    value = report.value if math.isfinite(report.value) else str(report.value)
    start = {"index": report.index, "status": "reported", "step": report.step}
    return encode_fields(report.key, {**start, "value": value, "pruned": report.is_pruned})


def encode_event(execution: Execution, event: RlmEvent) -> list[bytes]:
    """Return the lines of an event of a recursive query, which would be lost if the run is killed.

    These are the ended turn, which the outcome has too, and the attempt's usage of models if it has changed.
    """
    key, index, lines = execution.key, execution.index, list[bytes]()
    if event.kind == "output":
        query = event.query
        start = {"index": index, "status": "turn", "depth": query.depth, "prompt": query.prompt, "number": event.turn}
        lines.append(encode_fields(key, {**start, "turn": query.trajectory[event.turn - 1]}))
    usage = execution.get_usage()
    if event.kind in ("code", "query", "output") and usage != execution.recorded_usage:
        execution.recorded_usage = usage
        start = {"index": index, "attempt": execution.attempt, "status": "used"}
        lines.append(encode_fields(key, {**start, "usage": asdict(usage)}))
    return lines


def encode_fields(key: str, fields: dict[str, Any]) -> bytes:
    """Return a line with these fields after its version, key and time."""
    line = {"version": VERSION, "key": key, "at": time.time(), **fields}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def read_part_lines(part: Path, offset: int = 0) -> Iterator[LedgerLine]:
    """Yield the outcomes' lines in a part after an offset in bytes. Skip damaged and foreign lines."""
    for raw, position in read_raw_lines(part, offset):
        line = parse_line(raw, position)
        if line is not None:
            yield line


def count_usage(parts: Iterable[Path]) -> Usage:
    """Return the model's usage by all attempts in the parts, including those that were interrupted."""
    total = Usage()
    unfinished: dict[tuple[str, str, int], Usage] = {}  # the last usage of attempts without an outcome so far
    for part in sorted(parts, key=lambda part: (len(part.name), part.name)):  # A writer's second part before its tenth.
        writer = part.name.rpartition("-")[0]
        for raw, _ in read_raw_lines(part):
            try:
                line = json.loads(raw)
                attempt = writer, line["key"], line["attempt"]
                if line["status"] == "used":
                    unfinished[attempt] = USAGE.validate_python(line["usage"])
                else:
                    unfinished.pop(attempt, None)
                    if (line["meta"].get("judged") or {}).get("again"):
                        continue
                    queries = QUERIES.validate_python(line["meta"].get("queries") or {})
                    total += Usage(queries.calls, queries.prompt_tokens, queries.completion_tokens, queries.cost)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue  # The line is damaged or has no usage.
    return sum(unfinished.values(), total)


def read_raw_lines(part: Path, offset: int = 0) -> Iterator[tuple[bytes, LinePosition]]:
    """Yield the complete lines of a part after an offset in bytes, and their positions."""
    path = str(part)  # All positions share one text.
    with open(part, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return  # A pipe or a device could be endless.
        file.seek(offset)
        while raw := file.readline(MAX_LINE_BYTES):
            if not raw.endswith(b"\n"):
                return  # The writer of the line was killed, or is writing it.
            yield raw, LinePosition(path, offset, len(raw))
            offset += len(raw)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file. Opening a pipe would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_raw_line(position: LinePosition) -> bytes:
    """Return the bytes at a position, or b"" if the part was deleted."""
    try:
        with open(position.part, "rb", opener=_open_without_waiting) as file:
            file.seek(position.offset)
            return file.read(position.length)
    except OSError:
        return b""


def read_line(position: LinePosition) -> LedgerLine | None:
    """Return the outcome's line at a position; None if it is no longer there."""
    return parse_line(read_raw_line(position), position)


def parse_line(raw: bytes, position: LinePosition) -> LedgerLine | None:
    """Return the outcome's line; None if it is damaged, or is not an outcome.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    constants: list[str] = []  # NaN and infinities, which rlm-batch does not write
    try:
        data = json.loads(raw, parse_constant=constants.append)
        check_version(data, position.part)
        is_success = {"succeeded": True, "failed": False}[data["status"]]
        if is_success and (constants or "error" in data):
            return None
        if ("outputs" if is_success else "error") not in data:
            return None
        data["meta"]["queries"] = data["meta"].get("queries") or {}
        LineFields.model_validate(data)
        for numbers in (data, data["meta"], data["meta"]["queries"]):
            _check_numbers(numbers)
        restore_outcome(data)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    return LedgerLine(data["key"], data["at"], is_success, data, position)


def _check_numbers(data: dict[str, Any]) -> None:
    """Raise ValueError for a value that is not a number, or a number with which a report cannot calculate."""
    for name in NUMBER_NAMES & data.keys():
        value = data[name]
        if isinstance(value, bool | str) or abs(value or 0) >= MAX_NUMBER:
            raise ValueError(f"{name} is an impossible number")


def read_search_lines(part: Path) -> Iterator[SearchLine]:
    """Yield the points, reports and outcomes of a search in a part. Skip damaged and foreign lines."""
    for raw, position in read_raw_lines(part):
        line = parse_line(raw, position) or parse_form(raw, position.part, TRIAL_FORMS)
        if line is not None:
            yield line


def parse_form(raw: bytes, part: str, forms: Forms) -> Any:
    """Return the line as the type that `forms` has for its status; None if it is damaged or has another status.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        data = json.loads(raw)
        check_version(data, part)
        return forms[data["status"]].validate_json(raw)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return None
