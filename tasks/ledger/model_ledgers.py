"""The answers of language models, and whole requests to them, in files beside the outcomes.

`answers-<writer>-<n>.jsonl` has a line for each answer, whose key is a hash of the question.
`requests-<writer>-<n>.jsonl` has a line for each request of a run with `record="full"`, written when the request ends.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ...blocks.storage.location import PathOrLocation
from ...sandbox.outcomes.text_escape import HIDDEN, change_texts
from ..execution import Execution
from .ledger import Ledger
from .ledger_line import (
    Forms,
    LinePosition,
    encode_fields,
    parse_form,
    read_raw_line,
    read_raw_lines,
)
from .result_index import PartIndex

ANSWERS, REQUESTS = "answers", "requests"  # The files' names begin with these.
Json = dict[str, Any]


class AnswerLine(BaseModel):
    """The answer to the question with a key."""

    key: str
    answer: str


class RequestLine(BaseModel):
    """A request to a model. It has the first `kept` messages of the request before, and then `messages`."""

    model_config = ConfigDict(extra="allow")

    query: str
    kept: int
    messages: list[Json]


ANSWER_FORMS: Forms = {"answered": TypeAdapter(AnswerLine)}
REQUEST_FORMS: Forms = {"request": TypeAdapter(RequestLine)}


class ModelLedger:
    """A writer of files beside the outcomes, whose names begin with `kind` and `part_prefix`.

    It ignores an OSError, because writing an outcome reports it.
    """

    def __init__(self, path: PathOrLocation, kind: str, part_prefix: str = "") -> None:
        self._ledger = Ledger(path, part_prefix, kind)

    def close(self) -> None:
        """Close the file, or send the remaining lines to the location."""
        with suppress(OSError):
            self._ledger.close()

    def _write(self, line: bytes) -> LinePosition | None:
        with suppress(OSError):
            return self._ledger.write_line(line)
        return None


class AnswerLedger(ModelLedger):
    """The answers in a ledger. With a `root`, an index also finds the answers in every ledger directly below the root.

    If the index fails, the model is asked again.
    """

    def __init__(self, path: PathOrLocation, root: Path | None, part_prefix: str = "") -> None:
        super().__init__(path, ANSWERS, part_prefix)
        self._index = None if root is None else PartIndex(root, "answers.sqlite", f"{ANSWERS}-*.jsonl", _read_keys)
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
        answer = _read_answer(known, key)
        if answer is None and self._index is not None:
            with suppress(OSError):
                answer = _read_answer(self._index.find_position(key), key)
        return answer

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Write an answer of a model."""
        line = encode_fields(key, {"status": "answered", "model": model, "answer": text})
        self._answers[key] = self._write(line) or text


def _read_keys(part: Path, offset: int) -> Iterator[tuple[str | None, LinePosition]]:
    for raw, position in read_raw_lines(part, offset):
        line = parse_form(raw, position.part, ANSWER_FORMS)
        yield (None if line is None else line.key), position


def _read_answer(position: LinePosition | None, key: str) -> str | None:
    """Return the answer at a position; None without a position, or if the line there no longer has the key."""
    if position is None:
        return None
    line = parse_form(read_raw_line(position), position.part, ANSWER_FORMS)
    if line is None or line.key != key:
        return None
    return line.answer


class TranscriptLedger(ModelLedger):
    """The writer of a flow run's requests to language models. `hide` returns a text without credentials."""

    def __init__(self, path: PathOrLocation, hide: Callable[[str], str], part_prefix: str = "") -> None:
        super().__init__(path, REQUESTS, part_prefix)
        self._hide = hide

    def write(self, execution: Execution, line: Json) -> None:
        """Write a line of `Transcript` without credentials."""
        fields = change_texts(line, self._hide)
        if "logprobs" in fields and HIDDEN in fields["answer"] + fields.get("reasoning_content", ""):
            del fields["logprobs"]  # It would show the credential token by token.
        self._write(encode_fields(execution.key, {"index": execution.index, "attempt": execution.attempt, **fields}))


class TranscriptReader:
    """A reader of the requests in a ledger. It keeps only the positions of the lines in memory."""

    def __init__(self, path: PathOrLocation) -> None:
        self._ledger = Ledger(path, part_kind=REQUESTS)
        self._positions: dict[str, list[LinePosition]] = {}  # lines by the id of the session
        for part in self._ledger.list_parts():
            for raw, position in read_raw_lines(part):
                line = parse_form(raw, position.part, REQUEST_FORMS)
                if line is not None:
                    self._positions.setdefault(_get_session(line.query), []).append(position)

    def read_requests(self, tree: Iterable[Json]) -> Iterator[Json]:
        """Yield the requests of the queries of an outcome, in the order in which they ended."""
        for session in sorted({_get_session(record["id"]) for record in tree if "id" in record}):
            for position in self._positions.get(session, ()):
                line = parse_form(read_raw_line(position), position.part, REQUEST_FORMS)
                if line is not None:
                    yield line.model_dump()


def _get_session(query_id: str) -> str:
    """Return the id of the session from the id of one of its queries."""
    return query_id.rpartition("-")[0]
