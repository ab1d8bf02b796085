"""Lines of a ledger: their content, their encoding and parsing, and their positions.

Most lines are outcomes of executions. A search adds a line with a trial's point before the trial runs, and a line for
each report with the pruner's decision. A recursive query adds a line for each turn when it ends. Readers of outcomes
skip these other lines.
"""

import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta, QuerySummary
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json, restore_outcome
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Outcome, Result

VERSION = 1  # the version of the format of ledger lines, run records and the files of shards
MAX_LINE_BYTES = 256 * 1024 * 1024  # bytes of a line; longer ones are not ours
WrittenAt = Annotated[float, Field(validation_alias="at")]
QUERIES, USAGE = TypeAdapter(QuerySummary), TypeAdapter(Usage)
MAX_NUMBER = 1e15  # larger times, sizes and counts are not ours
NUMBER_TYPES = (int, float, int | None, float | None)
NUMBER_NAMES = {"at", *(item.name for item in (*fields(Meta), *fields(QuerySummary)) if item.type in NUMBER_TYPES)}


class ErrorFields(BaseModel):
    """The error of a failure."""

    error: str
    text: str


class LineFields(BaseModel):
    """The line of an outcome. A success has outputs, and a failure has an error."""

    key: str
    at: float
    meta: Meta
    index: int | None = None
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
    """The line of an outcome, read from a ledger, and `written_at` in epoch seconds.

    For a ledger at a location, the part in `position` is a local copy, which is deleted with its `Ledger` object.
    """

    key: str
    written_at: float
    is_success: bool
    data: dict[str, Any]
    position: LinePosition

    def to_outcome(self) -> Outcome:
        """Return the result or the failure that the line holds."""
        return outcome_from_json(self.data)


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """A trial's point: its key and number, its variables, and the number of their alternative in the space.

    `search` is a digest of the space, the code, and the fingerprint in the keys of the search's trials.
    """

    key: str
    index: int
    variables: dict[str, Any]
    alternative: int
    search: str
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
Forms = Mapping[str, TypeAdapter[Any]]  # the form of a line by its status
TRIAL_FORMS: Forms = {"asked": TypeAdapter(AskedTrial), "reported": TypeAdapter(TrialReport)}


def check_version(data: Any, path: object) -> None:
    """Raise ConfigurationError if a newer version of rlm-batch wrote the data; ValueError if none did."""
    version = data.get("version") if isinstance(data, dict) else None  # type: ignore[reportUnknownMemberType]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError("no version")
    if version > VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer version of rlm-batch (format {version!r}, this version reads "
            f"{VERSION}): upgrade rlm-batch, or move the file away"
        )


def encode_line(key: str, outcome: Outcome) -> bytes:
    """Return the line of an outcome."""
    status = "succeeded" if isinstance(outcome, Result) else "failed"
    start = {"index": outcome.meta.index, "attempt": outcome.meta.attempt, "status": status}
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


def encode_turn(key: str, index: int, prompt: str, depth: int, number: int, turn: dict[str, Any]) -> bytes:
    """Return the line of a recursive query's turn, with the number from 1. The execution's outcome has the turn too."""
    start = {"index": index, "status": "turn", "depth": depth, "prompt": prompt, "number": number}
    return encode_fields(key, {**start, "turn": turn})


def encode_usage(key: str, index: int, attempt: int, usage: Usage) -> bytes:
    """Return the line of the model's usage by an attempt so far. A run that is killed has no other line of it."""
    return encode_fields(key, {"index": index, "attempt": attempt, "status": "used", "usage": asdict(usage)})


def encode_fields(key: str, fields: dict[str, Any]) -> bytes:
    """Return a line with these fields after its version, key and time."""
    line = {"version": VERSION, "key": key, "at": time.time(), **fields}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def read_part_lines(part: Path, offset: int = 0) -> Iterator[LedgerLine]:
    """Yield the outcomes' lines in a part after an offset in bytes. Skip damaged and foreign lines."""
    lines = (parse_line(raw, position) for raw, position in read_raw_lines(part, offset))
    return (line for line in lines if line is not None)


def count_usage(parts: Iterable[Path]) -> Usage:
    """Return the model's usage by all attempts in the parts, including those that were interrupted."""
    total, attempts = Usage(), dict[tuple[str, str, int], Usage]()
    in_order = sorted(parts, key=lambda part: (len(part.name), part.name))  # A writer's second part before its tenth.
    lines = ((raw, part.name.rpartition("-")[0]) for part in in_order for raw, _ in read_raw_lines(part))
    for raw, writer in lines:
        try:
            line = json.loads(raw)
            attempt = writer, line["key"], line["attempt"]
            if line["status"] == "used":
                attempts[attempt] = USAGE.validate_python(line["usage"])
            else:
                attempts.pop(attempt, None)
                used = QUERIES.validate_python(line["meta"].get("queries") or {})
                total += Usage(used.calls, used.prompt_tokens, used.completion_tokens, used.cost)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return sum(attempts.values(), total)


def read_raw_lines(part: Path, offset: int = 0) -> Iterator[tuple[bytes, LinePosition]]:
    """Yield the complete lines of a part after an offset in bytes, and their positions."""
    path = str(part)  # All positions share one text.
    with open(part, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return  # A pipe or a device could be endless.
        file.seek(offset)
        for raw in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            start, offset = offset, offset + len(raw)
            if not raw.endswith(b"\n"):
                return  # The writer of the line was killed, or is writing it.
            yield raw, LinePosition(path, start, len(raw))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, and do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_raw_line(position: LinePosition) -> bytes:
    """Return the bytes at a position, or b"" if the part was deleted."""
    try:
        with open(position.part, "rb", opener=_open_at_once) as file:
            file.seek(position.offset)
            return file.read(position.length)
    except OSError:
        return b""


def read_line(position: LinePosition) -> LedgerLine | None:
    """Return the outcome's line at a position; None if it is no longer there."""
    return parse_line(read_raw_line(position), position)


def parse_line(raw: bytes, position: LinePosition) -> LedgerLine | None:
    """Return the outcome's line; None if it is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    constants: list[str] = []  # NaN and infinities, which are null in a line
    try:
        data = json.loads(raw, parse_constant=constants.append)
        check_version(data, position.part)
        is_success = {"succeeded": True, "failed": False}[data["status"]]
        if is_success and (constants or "error" in data):
            return None
        _ = data["outputs" if is_success else "error"]
        data["meta"]["queries"] = data["meta"].get("queries") or {}
        LineFields.model_validate(data)
        _check_numbers(data, data["meta"], data["meta"]["queries"])
        restore_outcome(data)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    return LedgerLine(data["key"], data["at"], is_success, data, position)


def _check_numbers(*parts: dict[str, Any]) -> None:
    """Raise ValueError for a number in the wrong form or beyond `MAX_NUMBER`, with which a report cannot calculate."""
    for part in parts:
        for name in NUMBER_NAMES & part.keys():
            value = part[name]
            if isinstance(value, bool | str) or abs(value or 0) >= MAX_NUMBER:
                raise ValueError(f"{name} is an impossible number")


def read_search_lines(part: Path) -> Iterator[SearchLine]:
    """Yield the lines of a search and its outcomes in a part. Skip damaged and foreign lines."""
    for raw, position in read_raw_lines(part):
        line = parse_line(raw, position) or parse_form(raw, position.part, TRIAL_FORMS)
        if line is not None:
            yield line


def parse_form(raw: bytes, part: str, forms: Forms) -> Any:
    """Return the line in the form of its status; None if it is damaged or has another status.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        data = json.loads(raw)
        check_version(data, part)
        return forms[data["status"]].validate_json(raw)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return None
