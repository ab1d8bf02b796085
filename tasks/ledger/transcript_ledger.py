"""The transcripts in a ledger: files `requests-*.jsonl` with a line for each request to a language model.

The ledger's other readers do not open these files. Lines are written when a request ends and then leave the memory.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ...blocks.language_model.credentials import HIDDEN
from ...blocks.storage.location import PathOrLocation
from ..execution import Execution
from .ledger import Ledger
from .ledger_line import LinePosition, check_version, encode_fields, read_raw_line, read_raw_lines

KIND = "requests"  # The files' names begin with this.
STATUSES = ("request", "output")
MAX_TEXT_CHARACTERS = 4_000_000  # of one text; more than the prompts of models with a million tokens
MAX_EXECUTION_BYTES = 256 * 1024 * 1024  # of one execution's lines; the rest is left out
Json = dict[str, Any]


class TranscriptLedger:
    """The writer of a flow run's transcripts. If it fails, or leaves lines out, `warn` is called once.

    Args:
        path: The ledger.
        hide: Returns a text without credentials.
        warn: Takes a sentence for people.
        part_prefix: The beginning of the files' names after `requests-`.
    """

    def __init__(
        self, path: PathOrLocation, hide: Callable[[str], str], warn: Callable[[str], None], part_prefix: str = ""
    ) -> None:
        self._ledger = Ledger(path, part_prefix, KIND)
        self._hide, self._warn = hide, warn
        self._sizes: Counter[int] = Counter()  # bytes by the number of the execution
        self._has_warned = False

    def write(self, execution: Execution, line: Json) -> None:
        """Write a line of `Transcript` without credentials and without the middle of very long texts."""
        fields = self._clean(line)
        if "logprobs" in fields and HIDDEN in fields["answer"] + fields.get("reasoning_content", ""):
            del fields["logprobs"]  # The tokens of a credential would be in them one by one.
        start = {"index": execution.index, "attempt": execution.attempt}
        data = encode_fields(execution.key, {**start, **fields})
        if self._sizes[execution.index] + len(data) > MAX_EXECUTION_BYTES:
            self._warn_once(
                f"the requests of execution {execution.index} exceed {MAX_EXECUTION_BYTES >> 20} MiB, so the ledger "
                "does not have all of them"
            )
            return
        self._sizes[execution.index] += len(data)
        try:
            self._ledger.write_line(data)
        except OSError as error:
            self._warn_once(f"requests to the language model were not saved: {error}")

    def close(self) -> None:
        """Close the file, or send the remaining lines to the location."""
        try:
            self._ledger.close()
        except OSError as error:
            self._warn_once(f"requests to the language model were not saved: {error}")

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return _cut(self._hide(value))
        if isinstance(value, dict):
            return {name: self._clean(item) for name, item in value.items()}  # type: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [self._clean(item) for item in value]  # type: ignore[reportUnknownVariableType]
        return value

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)


class TranscriptReader:
    """A reader of a ledger's transcripts. Only the positions of the lines are in memory."""

    def __init__(self, path: PathOrLocation) -> None:
        self._ledger = Ledger(path, part_kind=KIND)
        self._positions: dict[str, list[LinePosition]] = {}  # by the id of the session
        for part in self._ledger.list_parts():
            for raw, position in read_raw_lines(part):
                line = _parse_line(raw, position.part)
                if line is not None:
                    self._positions.setdefault(get_session(line["query"]), []).append(position)

    def read_session(self, session: str) -> Iterator[Json]:
        """Yield the lines of a session in the order in which the requests ended."""
        for position in self._positions.get(session, ()):
            raw = read_raw_line(position)
            line = None if raw is None else _parse_line(raw, position.part)
            if line is not None:
                yield line


def get_session(query_id: str) -> str:
    """Return the id of the session from the id of one of its queries."""
    return query_id.rpartition("-")[0]


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    half = MAX_TEXT_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _parse_line(raw: bytes, part: str) -> Json | None:
    """Return the line's fields; None if the line is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        line = json.loads(raw)
        check_version(line, part)
        is_whole = line["status"] in STATUSES and isinstance(line["query"], str)
        if line["status"] == "request":
            messages = line["messages"]
            is_whole &= isinstance(line["kept"], int) and all(isinstance(item, dict) for item in messages)
        return line if is_whole else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
