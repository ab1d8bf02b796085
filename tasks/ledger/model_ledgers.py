"""The answers of language models, and whole requests to them, in files beside the outcomes.

`answers-<writer>-<n>.jsonl` has a line for each answer, whose key is a hash of the question.
`requests-<writer>-<n>.jsonl` has a line for each request of a run with `record="full"`, written when the request ends.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ...blocks.language_model.credentials import HIDDEN
from ...blocks.storage.location import PathOrLocation
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
MAX_TEXT_CHARACTERS = 4_000_000  # of one text; more than the prompts of models with a million tokens
MAX_EXECUTION_BYTES = 256 * 1024 * 1024  # of one execution's requests; the rest is left out
Json = dict[str, Any]


class AnswerLine(BaseModel):
    """The answer to the question with a key."""

    key: str
    answer: str


class OutputLine(BaseModel):
    """The output that a model got from its code."""

    model_config = ConfigDict(extra="allow")

    query: str


class RequestLine(OutputLine):
    """A request to a model: the number of kept messages of the request before, and the further messages."""

    kept: int
    messages: list[Json]


ANSWER_FORMS: Forms = {"answered": TypeAdapter(AnswerLine)}
REQUEST_FORMS: Forms = {"request": TypeAdapter(RequestLine), "output": TypeAdapter(OutputLine)}


class ModelLedger:
    """A writer of lines of one kind beside the outcomes. If it fails, `warn` is called once, and the run goes on.

    The names of the files begin with `kind` and `part_prefix`.
    """

    def __init__(self, path: PathOrLocation, kind: str, warn: Callable[[str], None], part_prefix: str = "") -> None:
        self._ledger = Ledger(path, part_prefix, kind)
        self._kind, self._warn = kind, warn
        self._has_warned = False

    def close(self) -> None:
        """Close the file, or send the remaining lines to the location."""
        try:
            self._ledger.close()
        except OSError as error:
            self._warn_once(f"{self._kind} of the language model were not saved: {error}")

    def _write(self, line: bytes) -> LinePosition | None:
        try:
            return self._ledger.write_line(line)
        except OSError as error:
            self._warn_once(f"{self._kind} of the language model were not saved: {error}")
            return None

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)


class AnswerLedger(ModelLedger):
    """The answers in a ledger, and by an index the answers in every ledger directly below a root, unless it is None.

    If the index fails, the model is asked again.
    """

    def __init__(
        self, path: PathOrLocation, root: Path | None, warn: Callable[[str], None], part_prefix: str = ""
    ) -> None:
        super().__init__(path, ANSWERS, warn, part_prefix)
        self._index = None if root is None else PartIndex(root, "answers.sqlite", f"{ANSWERS}-*.jsonl", _read_keys)
        # This ledger's answers: the position of the line, or the text if the line has no position on this machine.
        self._answers: dict[str, LinePosition | str] = {}

    def load(self) -> None:
        """Find earlier answers. Raises OSError if the index or a location cannot be read."""
        if self._index is not None:
            self._index.refresh()
        for part in self._ledger.list_parts():
            self._answers |= {key: position for key, position in _read_keys(part, 0) if key is not None}

    def find_answer(self, key: str) -> str | None:
        """Return the answer to the question with a key, or None if it is unknown."""
        known = self._answers.get(key)
        if isinstance(known, str):
            return known
        text = None if known is None else _read_answer(known, key)
        if text is None and self._index is not None:
            try:
                position = self._index.find_position(key)
            except OSError as error:
                self._warn_once(f"answers of the language model are not found, and it is asked again: {error}")
                return None
            text = None if position is None else _read_answer(position, key)
        return text

    def add_answer(self, key: str, model: str, text: str) -> None:
        """Write an answer of a model."""
        line = encode_fields(key, {"status": "answered", "model": model, "answer": text})
        self._answers[key] = self._write(line) or text


def _read_keys(part: Path, offset: int) -> Iterator[tuple[str | None, LinePosition]]:
    for raw, position in read_raw_lines(part, offset):
        line = parse_form(raw, position.part, ANSWER_FORMS)
        yield (None if line is None else line.key), position


def _read_answer(position: LinePosition, key: str) -> str | None:
    """Return the answer at a position; None if the line there no longer has the key."""
    line = parse_form(read_raw_line(position), position.part, ANSWER_FORMS)
    return line.answer if line is not None and line.key == key else None


class TranscriptLedger(ModelLedger):
    """The writer of a flow run's requests to language models. `hide` returns a text without credentials."""

    def __init__(
        self, path: PathOrLocation, hide: Callable[[str], str], warn: Callable[[str], None], part_prefix: str = ""
    ) -> None:
        super().__init__(path, REQUESTS, warn, part_prefix)
        self._hide = hide
        self._sizes: Counter[int] = Counter()  # bytes by the number of the execution

    def write(self, execution: Execution, line: Json) -> None:
        """Write a line of `Transcript` without credentials and without the middle of very long texts."""
        fields = self._clean(line)
        if "logprobs" in fields and HIDDEN in fields["answer"] + fields.get("reasoning_content", ""):
            del fields["logprobs"]  # The tokens of a credential would be in them one by one.
        data = encode_fields(execution.key, {"index": execution.index, "attempt": execution.attempt, **fields})
        if self._sizes[execution.index] + len(data) > MAX_EXECUTION_BYTES:
            self._warn_once(
                f"the requests of execution {execution.index} exceed {MAX_EXECUTION_BYTES >> 20} MiB, so the ledger "
                "does not have all of them"
            )
            return
        self._sizes[execution.index] += len(data)
        self._write(data)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            text, half = self._hide(value), MAX_TEXT_CHARACTERS // 2
            if len(text) <= MAX_TEXT_CHARACTERS:
                return text
            return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
        if isinstance(value, dict):
            return {name: self._clean(item) for name, item in value.items()}  # type: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [self._clean(item) for item in value]  # type: ignore[reportUnknownVariableType]
        return value


class TranscriptReader:
    """A reader of the requests in a ledger. Only the positions of the lines are in memory."""

    def __init__(self, path: PathOrLocation) -> None:
        self._ledger = Ledger(path, part_kind=REQUESTS)
        self._positions: dict[str, list[LinePosition]] = {}  # by the id of the session
        for part in self._ledger.list_parts():
            for raw, position in read_raw_lines(part):
                line = parse_form(raw, position.part, REQUEST_FORMS)
                if line is not None:
                    self._positions.setdefault(get_session(line.query), []).append(position)

    def read_session(self, session: str) -> Iterator[Json]:
        """Yield the lines of a session in the order in which the requests ended."""
        for position in self._positions.get(session, ()):
            line = parse_form(read_raw_line(position), position.part, REQUEST_FORMS)
            if line is not None:
                yield line.model_dump()


def get_session(query_id: str) -> str:
    """Return the id of the session from the id of one of its queries."""
    return query_id.rpartition("-")[0]
