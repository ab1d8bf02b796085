"""The answers of language models that ledgers hold: `answers-<writer>-<n>.jsonl`, one line each, beside the outcomes.

A line: version, key, time, status, the model's name, and its answer. The key is a hash of the question, whose text is
in no line.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...blocks.storage.location import PathOrLocation
from .ledger import Ledger
from .ledger_line import VERSION, LinePosition, check_version, read_raw_lines
from .result_index import PartIndex

KIND = "answers"  # what the names of the files begin with
STATUS = "answered"


def make_answer_index(root: Path) -> PartIndex:
    """The index of the answers in every ledger directly below a root."""
    return PartIndex(root, "answers.sqlite", f"{KIND}-*.jsonl", _read_keys)


class AnswerLedger:
    """The answers that a ledger holds, and with the index those of every ledger below its root.

    New ones are written to the ledger. What goes wrong with that, or with the index, is said once, by `warn`: the
    question is asked again then.
    """

    def __init__(
        self, path: PathOrLocation, index: PartIndex, warn: Callable[[str], None], part_prefix: str = ""
    ) -> None:
        self._ledger = Ledger(path, part_prefix, KIND)
        self._index = index
        self._warn = warn
        self._has_warned = False
        # Of this ledger; the text itself where that is on its way to a location.
        self._answers: dict[str, LinePosition | str] = {}

    def load(self) -> None:
        """Looks up what is there already. Raises OSError where the index or a location cannot be read."""
        self._index.refresh()
        for part in self._ledger.list_parts():
            for key, position in _read_keys(part, 0):
                if key is not None:
                    self._answers[key] = position

    def find_answer(self, key: str) -> str | None:
        """The answer to the question with that key, None where there is none."""
        known = self._answers.get(key)
        if isinstance(known, str):
            return known
        try:
            text = None if known is None else _read_answer(known, key)
            if text is None and (position := self._index.find_position(key)) is not None:
                text = _read_answer(position, key)
        except OSError as error:
            self._warn_once(error)
            return None
        return text

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Writes an answer of the model of that name."""
        line = {"version": VERSION, "key": key, "at": time.time(), "status": STATUS, "model": model, "answer": text}
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        try:
            self._answers[key] = self._ledger.write_line(data) or text
        except OSError as error:
            self._answers[key] = text
            self._warn_once(error)

    def close(self) -> None:
        """Closes the file, and at a location sends what was not sent yet."""
        try:
            self._ledger.close()
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"answers of the language model may be asked for again: {error}")


def _read_keys(part: Path, offset: int) -> Iterator[tuple[str | None, LinePosition]]:
    for raw, position in read_raw_lines(part, offset):
        line = _parse_line(raw, part)
        yield (None if line is None else line["key"]), position


def _read_answer(position: LinePosition, key: str) -> str | None:
    """The answer at that position; None where that is no longer the one to the question with that key."""
    try:
        with open(position.part, "rb") as file:
            file.seek(position.offset)
            line = _parse_line(file.read(position.length), position.part)
    except OSError:  # the ledger was removed
        return None
    return line["answer"] if line is not None and line["key"] == key else None


def _parse_line(raw: bytes, part: str | Path) -> dict[str, Any] | None:
    """Return the line, or None if it is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        line = json.loads(raw)
        if not isinstance(line, dict):
            return None
        check_version(line, part)  # type: ignore[reportUnknownArgumentType]
    except (ValueError, RecursionError):
        return None
    if line.get("status") != STATUS:  # type: ignore[reportUnknownMemberType]
        return None
    is_whole = isinstance(line.get("key"), str) and isinstance(line.get("answer"), str)  # type: ignore[reportUnknownMemberType]
    return line if is_whole else None  # type: ignore[reportUnknownVariableType]
