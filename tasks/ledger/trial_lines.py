"""Lines of a ledger that tell of a search: a trial's point, before it runs, and each report with what was decided.

They stand among the outcomes, in the order in which all of that happened; whoever reads outcomes passes them over.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from .ledger_line import VERSION, LedgerLine, check_version, parse_line, read_raw_lines


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """A trial's point: its number, its key, the variables, and which alternative of the space they are from.

    `search` is a digest of what the search is over: of the space, the code, and what else is in its trials' keys.
    """

    key: str
    index: int
    variables: dict[str, Any]
    alternative: int
    search: str
    written_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What a trial has reported, and whether it was to end there."""

    key: str
    index: int
    step: int
    value: float
    is_pruned: bool
    written_at: float = 0.0


TrialLine = AskedTrial | TrialReport | LedgerLine


def encode_asked_trial(trial: AskedTrial) -> bytes:
    """The line of a trial that is about to run."""
    more = {"variables": trial.variables, "alternative": trial.alternative, "search": trial.search}
    return _encode(trial.key, trial.index, "asked", more)


def encode_trial_report(report: TrialReport) -> bytes:
    """The line of a report."""
    value = report.value if math.isfinite(report.value) else str(report.value)
    more = {"step": report.step, "value": value, "pruned": report.is_pruned}
    return _encode(report.key, report.index, "reported", more)


def _encode(key: str, index: int, status: str, more: dict[str, Any]) -> bytes:
    line = {"version": VERSION, "key": key, "at": time.time(), "index": index, "status": status, **more}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def read_trial_lines(parts: Iterable[Path]) -> Iterator[TrialLine]:
    """The lines of a search and its outcomes, in the order in which they were written.

    A search has one writer at a time, so that whole parts follow each other.
    """
    ordered = sorted((first.written_at, part) for part in parts for first in islice(_read_part(part), 1))
    for _, part in ordered:
        yield from _read_part(part)


def _read_part(part: Path) -> Iterator[TrialLine]:
    for raw, position in read_raw_lines(part):
        line = parse_line(raw, position) or _parse_trial_line(raw, part)
        if line is not None:
            yield line


def _parse_trial_line(raw: bytes, part: Path) -> AskedTrial | TrialReport | None:
    """Return the line, or None if it is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        data = json.loads(raw)
        check_version(data, part)
        if data["status"] == "asked":
            trial = AskedTrial(
                data["key"], data["index"], data["variables"], data["alternative"], data["search"], data["at"]
            )
            types = (str, int, dict, int, str)
            values = (trial.key, trial.index, trial.variables, trial.alternative, trial.search)
            is_whole = all(type(value) is kind for value, kind in zip(values, types, strict=True))
            return trial if is_whole and trial.index >= 0 and trial.written_at >= 0 else None
        if data["status"] != "reported" or type(data["step"]) is not int or data["step"] < 0:
            return None
        if type(data["index"]) is not int or not isinstance(data["key"], str):
            return None
        value = float(data["value"])
        return TrialReport(data["key"], data["index"], data["step"], value, data["pruned"] is True, float(data["at"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
