"""The answers of language models in ledgers: `answers-<writer>-<n>.jsonl`, a line for each, beside the outcomes.

A line has a version, a key, a time, a status, the model's name, and the answer. The key is a hash of the question. The
text of the question is not in the line.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...blocks.storage.location import PathOrLocation
from .ledger import Ledger
from .ledger_line import LinePosition, check_version, encode_fields, read_raw_line, read_raw_lines
from .result_index import PartIndex

KIND = "answers"  # The files' names begin with this.
STATUS = "answered"


class AnswerLedger:
    """The answers in a ledger, and by an index the answers in every ledger directly below a root, unless it is None.

    New answers are written to the ledger. If the ledger or the index fails, `warn` is called once, and the model is
    asked again.
    """

    def __init__(
        self, path: PathOrLocation, root: Path | None, warn: Callable[[str], None], part_prefix: str = ""
    ) -> None:
        self._ledger = Ledger(path, part_prefix, KIND)
        self._index = None if root is None else PartIndex(root, "answers.sqlite", f"{KIND}-*.jsonl", _read_keys)
        self._warn = warn
        self._has_warned = False
        # This ledger's answers: the position of the line, or the text if the line has no position on this machine.
        self._answers: dict[str, LinePosition | str] = {}

    def load(self) -> None:
        """Find earlier answers. Raises OSError if the index or a location cannot be read."""
        if self._index is not None:
            self._index.refresh()
        for part in self._ledger.list_parts():
            for key, position in _read_keys(part, 0):
                if key is not None:
                    self._answers[key] = position

    def find_answer(self, key: str) -> str | None:
        """Return the answer to the question with a key, or None if it is unknown."""
        known = self._answers.get(key)
        if isinstance(known, str):
            return known
        try:
            text = None if known is None else _read_answer(known, key)
            if text is None and self._index is not None:
                position = self._index.find_position(key)
                text = None if position is None else _read_answer(position, key)
        except OSError as error:
            self._warn_once(error)
            return None
        return text

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Write an answer of a model."""
        line = encode_fields(key, {"status": STATUS, "model": model, "answer": text})
        try:
            self._answers[key] = self._ledger.write_line(line) or text
        except OSError as error:
            self._answers[key] = text
            self._warn_once(error)

    def close(self) -> None:
        """Close the file, or send the remaining lines to the location."""
        try:
            self._ledger.close()
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"answers of the language model were not saved, so they may be asked again: {error}")


def _read_keys(part: Path, offset: int) -> Iterator[tuple[str | None, LinePosition]]:
    for raw, position in read_raw_lines(part, offset):
        line = _parse_line(raw, part)
        yield (None if line is None else line["key"]), position


def _read_answer(position: LinePosition, key: str) -> str | None:
    """Return the answer at a position; None if the line there no longer has the key."""
    raw = read_raw_line(position)
    line = None if raw is None else _parse_line(raw, position.part)
    return line["answer"] if line is not None and line["key"] == key else None


def _parse_line(raw: bytes, part: str | Path) -> dict[str, Any] | None:
    """Return the line's fields; None if the line is damaged or foreign.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    try:
        line = json.loads(raw)
        check_version(line, part)
        is_whole = line["status"] == STATUS and isinstance(line["key"], str) and isinstance(line["answer"], str)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return line if is_whole else None
