"""The ledger of a conversation with a recursive model, from which another process continues it.

Beside the lines of a flow run, `messages-<writer>-<n>.jsonl` has a line for each message and for each later change of
the conversation's state. The key of these lines is the conversation's.
"""

import time
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ...blocks.storage.location import PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.budget import Usage
from ...sandbox.queries.records import ConversationState, RlmEvent
from ...sandbox.result import Outcome, Result
from ..execution import Execution
from .ledger import Ledger
from .ledger_line import Forms, count_usage, encode_event, encode_fields, parse_form, read_raw_lines
from .model_ledgers import AnswerLedger
from .run_record import RunRecord

FLOW = "open_rlm"  # the flow in the record of a conversation


class MessageLine(BaseModel):
    """The state of a conversation. `message` is the last one of its history, at `position`."""

    key: str
    at: float
    position: int
    message: dict[str, Any]
    outcome: str
    question: int
    start: int


MESSAGE_FORMS: Forms = {"message": TypeAdapter(MessageLine)}


class ConversationLedger:
    """The ledger of one conversation, which one process at a time may use.

    `open` sets `state`, `outcomes` (one for each question) and `usage` (all usage of models, also by attempts at a
    question that a kill has interrupted), as the processes before have left them.
    """

    _key: str  # the key of the conversation, set by `open`
    _record: RunRecord
    _question: Execution  # the present question, set by `begin_question`

    def __init__(self, path: PathOrLocation) -> None:
        self._ledger = Ledger(path)
        self._messages = Ledger(path, part_kind="messages")
        self._answers = AnswerLedger(path, None)
        self.is_open = False
        self.state = ConversationState()
        self.outcomes: list[Outcome] = []
        self.usage = Usage()

    def open(self, provider: str) -> None:
        """Read the conversation so far, and register this process as its writer.

        Raises ConfigurationError if another process has the conversation, or the ledger is that of a flow run, and
        OSError if a location cannot be read.
        """
        self._ledger.create()
        is_alone = self._ledger.register_writer()
        try:
            if not is_alone:
                raise ConfigurationError(
                    f"another process has the conversation in {self._ledger.path}: wait until it has ended, or pass "
                    "another results_path"
                )
            self._read()
        except BaseException:
            self._ledger.unregister_writer()
            raise
        self.is_open = True
        name, path = f"conversation-{self._key[:8]}", str(self._ledger.path)
        self._record = RunRecord(FLOW, path, name=name, what="question", provider=provider, began=time.time())
        self._record.write()

    def _read(self) -> None:
        """Set the state, the outcomes and the usage from the ledger."""
        lines: list[MessageLine] = []
        for part in self._messages.list_parts():
            parsed = [parse_form(raw, position.part, MESSAGE_FORMS) for raw, position in read_raw_lines(part)]
            lines += [line for line in parsed if line is not None]
        parts = self._ledger.list_parts()
        if parts and not lines:
            raise ConfigurationError(
                f"{self._ledger.path} has the results of a run and no conversation: pass another results_path"
            )
        self._key, self.state = uuid.uuid4().hex, ConversationState()
        for line in sorted(lines, key=lambda line: line.at):
            history = self.state.history
            history[line.position :] = [line.message]
            self._key, self.state = line.key, ConversationState(history, line.outcome, line.question, line.start)
        outcomes = [line.to_outcome() for line in self._ledger.load_latest_lines().values()]
        self.outcomes = sorted(outcomes, key=lambda outcome: outcome.meta.index or 0)
        self.usage = count_usage(parts)
        self._answers.load()

    def begin_question(self, query: str, get_usage: Callable[[], Usage]) -> AnswerCache:
        """Begin the next question, or again one that a kill has interrupted.

        Args:
            query: The question.
            get_usage: Returns the usage of models for the question so far.

        Returns:
            The answers of models that the interrupted attempt had.
        """
        index = len(self.outcomes)
        self._question = Execution(index, "", {"query": query}, f"{self._key} {index}", get_usage=get_usage)
        return AnswerCache(self._answers, self._question.key)

    def save_state(self, state: ConversationState) -> None:
        """Write the last message, and what else may have changed. Raises OSError if it cannot be written."""
        message = {"position": len(state.history) - 1, "message": state.history[-1]}
        others = {"outcome": state.outcome, "question": state.question, "start": state.start}
        self._messages.write_line(encode_fields(self._key, {"status": "message", **message, **others}))

    def write_event(self, event: RlmEvent) -> None:
        """Write an ended turn and the usage so far. Raises OSError if they cannot be written."""
        for line in encode_event(self._question, event):
            self._ledger.write_line(line)

    def add_outcome(self, outcome: Outcome) -> None:
        """Write the outcome of the question. Raises OSError if it cannot be written."""
        self.outcomes.append(outcome)
        self._ledger.write_outcome(self._question.key, outcome)

    def close(self) -> None:
        """Send what a location lacks, and let other processes continue. Raises OSError if the location fails."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._record.total = len(self.outcomes)
            self._record.succeeded = sum(isinstance(outcome, Result) for outcome in self.outcomes)
            self._record.failed = self._record.total - self._record.succeeded
            self._record.finish()
            for writer in (self._answers, self._messages, self._ledger):
                writer.close()
        finally:
            self._ledger.unregister_writer()
