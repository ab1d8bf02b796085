"""A line of a ledger: what it holds, how it is written and read, and where it stands."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...sandbox.errors import ConfigurationError
from ...sandbox.outcomes.outcome_json import outcome_from_json, outcome_to_json, restore_outcome
from ...sandbox.result import Outcome, Result

VERSION = 1  # of the format of ledger lines, run records and the files of shards
# The fields of an outcome's meta that are computed with, and the type that each has to have for that.
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
    "value_nonfinite": dict,
}


class LinePosition(NamedTuple):
    """Where a line stands: its part's path, and its offset and length in bytes."""

    part: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of what follows."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One line of a ledger, as it was read; `written_at` is in epoch seconds.

    The part of a ledger at a location is a local copy, which is deleted with the `Ledger` that has fetched it.
    """

    key: str
    written_at: float
    is_success: bool
    data: dict[str, Any]
    position: LinePosition

    def to_outcome(self) -> Outcome:
        """The result or the failure that the line holds."""
        return outcome_from_json(self.data)


def check_version(data: dict[str, Any], path: object) -> None:
    """Check the version of the format of `data`, which was read from `path`.

    Raises:
        ConfigurationError: a newer version of rlm-batch wrote it.
        ValueError: it has no version, so something else wrote it.
    """
    version: Any = data.get("version")
    if not _has_type(version, int) or version < 1:
        raise ValueError("no version")
    if version > VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer version of rlm-batch (format {version}, and this version reads format "
            f"{VERSION}): upgrade rlm-batch, or move the file away"
        )


def encode_line(key: str, outcome: Outcome) -> bytes:
    """The line of an outcome, as a ledger has it."""
    line = {
        "version": VERSION,
        "key": key,
        "at": time.time(),
        "index": outcome.meta.index,
        "attempt": outcome.meta.attempt,
        "status": "succeeded" if isinstance(outcome, Result) else "failed",
        **outcome_to_json(outcome),
    }
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def read_part_lines(part: Path, offset: int = 0) -> Iterator[LedgerLine]:
    """The whole lines of a part from that offset in bytes on; damaged and foreign ones are skipped."""
    for raw, position in read_raw_lines(part, offset):
        line = parse_line(raw, position)
        if line is not None:
            yield line


def read_raw_lines(part: Path, offset: int = 0) -> Iterator[tuple[bytes, LinePosition]]:
    """The whole lines of a part from that offset in bytes on, as they are, and where they stand."""
    path = str(part)  # once: whoever holds many positions holds one text
    with part.open("rb") as file:
        file.seek(offset)
        for raw in file:
            start, offset = offset, offset + len(raw)
            if not raw.endswith(b"\n"):
                return  # torn: its writer was killed, or is writing it
            yield raw, LinePosition(path, start, len(raw))


def read_line(position: LinePosition) -> LedgerLine | None:
    """The line at that position; None if it is no longer there."""
    try:
        with open(position.part, "rb") as file:
            file.seek(position.offset)
            return parse_line(file.read(position.length), position)
    except OSError:
        return None


def parse_line(raw: bytes, position: LinePosition) -> LedgerLine | None:
    """Return the line, or None if it is not one that `encode_line` writes: damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    constants: list[str] = []  # NaN and infinities, which are null in a line
    try:
        data = json.loads(raw, parse_constant=constants.append)
        if not _has_type(data, dict):
            return None
        check_version(data, position.part)
    except (ValueError, RecursionError):
        return None
    if not _has_type(data.get("key"), str) or not _has_type(data.get("at"), (int, float)):
        return None
    is_success = data.get("status") == "succeeded"
    if is_success and constants:
        return None
    if not is_success and data.get("status") != "failed":
        return None
    content, meta = data.get("outputs" if is_success else "error"), data.get("meta")
    if not _has_type(content, dict) or not _has_type(meta, dict) or not _has_type(data.get("index"), (int, type(None))):
        return None
    if is_success == ("error" in data) or not (
        is_success or (_has_type(content.get("error"), str) and _has_type(content.get("text"), str))
    ):
        return None
    if not all(_has_type(meta[name], expected) for name, expected in META_TYPES.items() if name in meta):
        return None
    if not _has_type((meta.get("queries") or {}).get("tree", []), list):
        return None
    if not _has_type(data.get("nonfinite", {}), dict) or not _has_type(meta.get("nonfinite", {}), dict):
        return None
    if not all(_has_type(bundle, dict) for bundle in meta.get("displays", [])):
        return None
    if not all(_has_type(text, str) for name in ("collected", "not_collected") for text in meta.get(name, [])):
        return None
    try:
        restore_outcome(data)
    except ValueError:
        return None
    return LedgerLine(data["key"], data["at"], is_success, data, position)


def _has_type(value: Any, expected: type | tuple[type, ...]) -> bool:
    return isinstance(value, expected) and not isinstance(value, bool)
