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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json, restore_outcome
from ...sandbox.queries.budget import Usage
from ...sandbox.result import Outcome, Result

VERSION = 1  # the version of the format of ledger lines, run records and the files of shards
MAX_LINE_BYTES = 256 * 1024 * 1024  # bytes of a line; longer ones are not ours
MAX_NUMBER = 1e15  # Larger times, sizes and counts are not ours.
# The types that fields must have. Fields that the program only passes on may have any type.
LINE_TYPES: dict[str, Any] = {
    "key": str,
    "at": (int, float),
    "index": (int, type(None)),
    "outputs": dict,
    "error": dict,
    "meta": dict,
    "nonfinite": dict,
}
META_TYPES: dict[str, Any] = {
    "index": (int, type(None)),
    "variables": dict,
    "seconds": (int, float),
    "attempt": int,
    "layers": list,
    "earlier_errors": list,
    "files": list,
    "stdout": str,
    "stderr": str,
    "queries": (dict, type(None)),
    "value_repr": (str, type(None)),
    "displays": list,
    "collected": list,
    "not_collected": list,
    "group": int,
    "repeat": int,
    "cpu_seconds": (int, float),
    "peak_mib": (int, float),
    "kept_until": (int, float),
    "nonfinite": dict,
    "value_nonfinite": dict,
    "judged": dict,
    "judged_nonfinite": dict,
}
USAGE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("asked", "failed", "calls", "prompt_tokens", "completion_tokens", "cached"), int),
    "cost": (int, float, type(None)),
    "tree": list,
}
TRIAL_TYPES: dict[str, dict[str, Any]] = {
    "asked": {"key": str, "index": int, "variables": dict, "alternative": int, "search": str, "at": (int, float)},
    "reported": {"key": str, "index": int, "step": int, "at": (int, float)},
}


USAGE_FIELDS = ("calls", "prompt_tokens", "completion_tokens", "cost")


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
    """The line of an outcome, read from a ledger. `written_at` is in epoch seconds.

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
    written_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A value that a trial has reported, and whether the trial was pruned at this report."""

    key: str
    index: int
    step: int
    value: float
    is_pruned: bool
    written_at: float = 0.0


SearchLine = AskedTrial | TrialReport | LedgerLine


def check_version(data: Any, path: object) -> None:
    """Check the version of the format of `data`, which was read from `path`.

    Raises:
        ConfigurationError: A newer version of rlm-batch wrote the data.
        ValueError: The data has no version, so rlm-batch did not write it.
    """
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
    start = {"index": trial.index, "status": "asked", "variables": trial.variables}
    return encode_fields(trial.key, {**start, "alternative": trial.alternative, "search": trial.search})


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
    for raw, position in read_raw_lines(part, offset):
        line = parse_line(raw, position)
        if line is not None:
            yield line


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
                check_types(line["usage"], USAGE_TYPES)
                attempts[attempt] = Usage(**line["usage"])
            else:
                attempts.pop(attempt, None)
                queries = line["meta"].get("queries") or {}
                check_types(queries, USAGE_TYPES)
                total += Usage(*(queries.get(name, 0) for name in USAGE_FIELDS))
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


def read_line(position: LinePosition) -> LedgerLine | None:
    """Return the line at a position; None if it is no longer there."""
    raw = read_raw_line(position)
    return None if raw is None else parse_line(raw, position)


def read_raw_line(position: LinePosition) -> bytes | None:
    """Return the bytes at a position; None if the part was deleted."""
    try:
        with open(position.part, "rb", opener=_open_at_once) as file:
            file.seek(position.offset)
            return file.read(position.length)
    except OSError:
        return None


def parse_line(raw: bytes, position: LinePosition) -> LedgerLine | None:
    """Return the line. None if it is damaged or foreign, which means that `encode_line` did not write it.

    Raises ConfigurationError if a newer version of rlm-batch wrote the line.
    """
    constants: list[str] = []  # NaN and infinities, which are null in a line
    try:
        data = json.loads(raw, parse_constant=constants.append)
        check_version(data, position.part)
        is_success = {"succeeded": True, "failed": False}[data["status"]]
        if is_success and (constants or "error" in data):
            return None
        check_types(data, LINE_TYPES, required=("key", "at", "meta", "outputs" if is_success else "error"))
        if not is_success:
            check_types(data["error"], {"error": str, "text": str}, required=("error", "text"))
        meta = data["meta"]
        check_types(meta, META_TYPES)
        check_types(meta.get("queries") or {}, USAGE_TYPES)
        for name, kind in (("displays", dict), ("collected", str), ("not_collected", str)):
            if not all(isinstance(item, kind) for item in meta.get(name, [])):
                return None
        restore_outcome(data)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return LedgerLine(data["key"], data["at"], is_success, data, position)


def check_types(data: Any, types: dict[str, Any], *, required: Iterable[str] = ()) -> None:
    """Check the types of fields, and that numbers are credible.

    Raises:
        TypeError: A field does not have its type in `types`.
        KeyError: A required field is missing.
        ValueError: A number is larger than our writer's.
    """
    for name in required:
        data[name]
    for name, kind in types.items():
        value = data.get(name)
        if name in data and (not isinstance(value, kind) or isinstance(value, bool)):
            raise TypeError(name)
        if isinstance(value, (int, float)) and not abs(value) < MAX_NUMBER:
            raise ValueError(name)


def read_search_lines(part: Path) -> Iterator[SearchLine]:
    """Yield the lines of a search and its outcomes in a part. Skip damaged and foreign lines."""
    for raw, position in read_raw_lines(part):
        line = parse_line(raw, position) or _parse_trial_line(raw, part)
        if line is not None:
            yield line


def _parse_trial_line(raw: bytes, part: Path) -> AskedTrial | TrialReport | None:
    """Return the line; None if it is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        data = json.loads(raw)
        check_version(data, part)
        types = TRIAL_TYPES[data["status"]]
        check_types(data, types, required=types)
        if min(data["index"], data.get("step", 0), data["at"]) < 0:
            return None
        if data["status"] == "asked":
            return AskedTrial(*(data[name] for name in types))
        value, is_pruned = float(data["value"]), data["pruned"] is True
        return TrialReport(data["key"], data["index"], data["step"], value, is_pruned, data["at"])
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return None
