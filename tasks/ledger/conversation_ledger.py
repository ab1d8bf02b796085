"""The ledger of a conversation with a recursive model, from which another process continues it.

Beside the lines of a flow run, it has a line for each message and for each later change of the conversation's state.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace

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

FLOW = "open_rlm"  # the flow in the record, and the first word of all keys


class StateLine(BaseModel):
    """The state of a conversation, without the messages before `position`."""

    number: int  # the number of state lines before this one
    position: int
    state: ConversationState


STATE_FORMS: Forms = {"state": TypeAdapter(StateLine)}


class ConversationLedger:
    """The ledger of one conversation, which one process at a time may use.

    `state`, `outcomes` (one for each question) and `usage` (all usage of models, also by interrupted questions) are
    those of the processes before.
    """

    _question: Execution  # the present question, set by `begin_question`

    def __init__(self, path: PathOrLocation, provider: str) -> None:
        """Lock the conversation, and read it.

        Raises ConfigurationError if another process has the conversation, or the ledger lacks a part of it.
        Raises OSError if a location cannot be read.
        """
        self._answers = AnswerLedger(path, None)
        self._ledger = Ledger(path)
        self._ledger.create()
        is_alone = self._ledger.register_writer()
        try:
            if not is_alone:
                raise ConfigurationError(
                    f"another process has the conversation in {path}: wait until it has ended, or pass another "
                    "results_path"
                )
            self._read()
        except BaseException:
            self._ledger.unregister_writer()
            raise
        self._record = RunRecord(FLOW, str(path), name=path.name, what="question", provider=provider, began=time.time())
        self._record.write()

    def _read(self) -> None:
        """Set the state, the outcomes and the usage from the ledger."""
        parts, self.state = self._ledger.list_parts(), ConversationState()
        parsed = [parse_form(raw, str(part), STATE_FORMS) for part in parts for raw, _ in read_raw_lines(part)]
        states: list[StateLine] = sorted(filter(None, parsed), key=lambda line: line.number)
        is_whole = bool(states) or not parsed
        for number, line in enumerate(states):
            history = [*self.state.history[: line.position], *line.state.history]
            last_position = max(line.position, line.state.question, line.state.start)
            is_whole = is_whole and line.number == number and last_position < len(history)
            self.state = replace(line.state, history=history)
        if not is_whole:
            raise ConfigurationError(
                f"{self._ledger.path} has the results of a run, or a conversation without some of its lines: pass "
                "another results_path"
            )
        self._state_count, self._saved_messages = len(states), len(self.state.history)
        lines = self._ledger.load_latest_lines().values()
        outcomes = [line.to_outcome() for line in lines if line.key.startswith(FLOW)]
        self.outcomes = sorted(outcomes, key=lambda outcome: outcome.meta.index or 0)
        self.question_count = 1 + max((outcome.meta.index or 0 for outcome in outcomes), default=-1)
        self.usage = count_usage(parts)
        self._answers.load()

    def begin_question(self, index: int, query: str, get_usage: Callable[[], Usage], *, shares: bool) -> AnswerCache:
        """Begin a question, or again one that a kill has interrupted. Return the answers of models that it had.

        `get_usage` returns the usage of models for the question so far. With `shares`, all questions share answers.
        """
        self._question = Execution(index, "", {"query": query}, f"{FLOW} {index}", get_usage=get_usage)
        return AnswerCache(self._answers, None if shares else self._question.key)

    def save_state(self, state: ConversationState) -> None:
        """Write the last message and those that could not be written before. Raises OSError if that fails."""
        position = self._saved_messages = min(self._saved_messages, len(state.history) - 1)
        changed = asdict(replace(state, history=state.history[position:]))
        fields = {"status": "state", "number": self._state_count, "position": position, "state": changed}
        self._ledger.write_line(encode_fields(FLOW, fields))
        self._state_count, self._saved_messages = self._state_count + 1, len(state.history)

    def write_event(self, event: RlmEvent) -> None:
        """Write an ended turn and the usage so far. Raises OSError if they cannot be written."""
        for line in encode_event(self._question, event):
            self._ledger.write_line(line)

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the outcome of the question. Raises OSError if it cannot be written."""
        self.outcomes.append(outcome)
        self._ledger.write_outcome(self._question.key, outcome)

    def close(self) -> None:
        """Send what a location lacks, and let other processes continue. Raises OSError if the location fails."""
        try:
            self._record.total = len(self.outcomes)
            self._record.succeeded = sum(isinstance(outcome, Result) for outcome in self.outcomes)
            self._record.failed = self._record.total - self._record.succeeded
            self._record.finish()
            self._answers.close()
            self._ledger.close()
        finally:
            self._ledger.unregister_writer()
