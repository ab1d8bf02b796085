"""The work of language models in a run: questions with their turns, and the queries of each turn's code.

The outcomes have the turns and the beginnings of prompts and answers. The requests of a run with `record="full"` have
whole prompts and answers, also of the queries that the outcomes only count.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...sandbox.queries.budget import Usage
from ...sandbox.queries.flat_request import find_last_text
from ...sandbox.queries.records import shorten
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.model_ledgers import TranscriptReader
from .ledger_reader import LedgerReader
from .report import name_execution
from .summary import MAX_SHOWN, MAX_SHOWN_BYTES
from .table import MAX_VARIABLES, format_variables

MAX_TURN_QUERIES = 200  # queries of one turn that are shown
PROMPT_CHARACTERS = 4_000  # characters of a prompt, and of an answer
TITLE_CHARACTERS = 200  # characters of a question in a title
TURN_CHARACTERS = 20_000  # characters of each text of a turn
# The texts of a turn: their names in the trajectory, and those that are shown.
TURN_TEXTS = {"summary": "summary", "thoughts": "thoughts", "reasoning": "model", "code": "code", "output": "output"}
NOTE = (
    "Prompts are cut to 200 characters and answers to 2,000, and of each question's queries only the first 1,000 are "
    'here: a run with record="full" (--record full) keeps all of them whole.'
)
MORE = "more queries are not shown: with --record full, --messages FILE writes all"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ShownQueries:
    """Queries in the order in which they were asked, and the number of those that are left out."""

    shown: "list[ShownQuery]"
    omitted_count: int


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of a recursive model. `texts` has pairs of a name and a text, such as "code" and the code."""

    number: int
    has_failed: bool
    figures: str
    texts: list[tuple[str, str]]
    queries: ShownQueries  # the queries of its code


@dataclass(frozen=True, slots=True)
class ShownQuery:
    """A query, or an execution that asked queries. `number` counts the queries of a turn, from 1."""

    number: int
    title: str
    figures: str  # calls, tokens, cost and seconds
    prompt: str
    answer: str
    error: str
    turns: list[ShownTurn]  # empty if the query is not recursive
    others: ShownQueries  # the queries of no known turn


class TurnsReader:
    """A reader of what language models did in a run. `note` says what the run has not kept of the executions so far."""

    def __init__(self, reader: LedgerReader) -> None:
        self.note = ""
        self._reader = reader
        self._transcripts = TranscriptReader(reader.ledger.path)
        self._free_characters = MAX_SHOWN_BYTES

    def read_page(self) -> ShownQueries:
        """Return the first executions that asked queries, within the limits of a page."""
        shown: list[ShownQuery] = []
        omitted_count = 0
        for outcome in self._reader.read_outcomes(with_reduction=True):
            has_queries = bool(outcome.meta.queries.tree)
            if has_queries and len(shown) < MAX_SHOWN and self._free_characters > 0:
                shown.append(self.read_execution(outcome))
            else:
                omitted_count += has_queries
        return ShownQueries(shown, omitted_count)

    def read_execution(self, outcome: Outcome) -> ShownQuery:
        """Return an execution as a query: a question with its turns, or other code with its queries."""
        meta = outcome.meta
        noun, question = self._reader.records[-1].report_spec.noun, meta.variables.get("query", "")
        queries = self._select(self._read_queries(meta.queries.tree))
        usage = Usage(meta.queries.calls, meta.queries.prompt_tokens, meta.queries.completion_tokens, meta.queries.cost)
        figures = usage.describe(meta.queries.cached, meta.seconds)
        shown = ShownQuery(0, name_execution(noun, meta), figures, "", "", "", [], queries)
        if noun == "question" and queries.shown:
            title = f"{noun.capitalize()} {meta.index}: {question[:TITLE_CHARACTERS]}"
            shown = replace(queries.shown[0], number=0, title=title, figures=figures)
        if isinstance(outcome, Result):
            return replace(shown, answer=shown.answer or format_variables(outcome.outputs, MAX_VARIABLES))
        error = f"{type(outcome.error).__name__}: {outcome.error.summary}"
        return replace(shown, answer="", error=self._shorten(error, PROMPT_CHARACTERS))

    def _read_queries(self, tree: Sequence[Json]) -> list[Json]:
        """Return the queries of an outcome, with what its requests have: prompts, answers, and more queries."""
        requested: dict[str, Json] = {}
        for line in self._transcripts.read_requests(tree):
            _add_request(requested.setdefault(line["query"], {}), line)
        if not requested:
            self.note = NOTE
        queries = deepcopy(list(tree))
        by_id: dict[str, Json] = {"": {"queries": queries}}
        unvisited = list(queries)
        while unvisited:
            record = unvisited.pop()
            by_id[record.get("id", "none")] = record
            unvisited += record.get("queries", ())
        # The ids count the queries in the order in which they were asked, and a longer id has a larger number.
        for query_id in sorted(requested, key=lambda query_id: (len(query_id), query_id)):
            record = requested[query_id]
            if query_id in by_id:
                by_id[query_id] |= {name: record[name] for name in ("prompt", "answer") if record.get(name)}
            elif (
                "seconds" in record and record["parent"] in by_id
            ):  # Of recursive queries, the requests have no outputs.
                by_id[record["parent"]].setdefault("queries", []).append(record)
        return queries

    def _select(self, records: Sequence[Json], count: int = 0) -> ShownQueries:
        """Return the queries to show, of `count` or more. Of too many, those that failed are kept first."""
        numbered = list(enumerate(records, 1))
        failed_first = sorted(numbered, key=lambda item: not item[1].get("error"))
        shown: list[ShownQuery] = []
        for number, record in sorted(failed_first[:MAX_TURN_QUERIES], key=lambda item: item[0]):
            if self._free_characters > 0:
                shown.append(self._show_query(number, record))
        return ShownQueries(shown, max(count, len(records)) - len(shown))

    def _show_query(self, number: int, record: Json) -> ShownQuery:
        by_turn: dict[int, list[Json]] = {}
        for asked in record.get("queries", ()):
            by_turn.setdefault(asked.get("turn", 0), []).append(asked)
        trajectory: list[Json] = record.get("trajectory", [])
        turns = [self._show_turn(turn, item, by_turn.pop(turn, [])) for turn, item in enumerate(trajectory, 1)]
        return ShownQuery(
            number=number,
            title=f"{record['kind']} at depth {record['depth']}, {record['model']}",
            figures=_read_usage(record).describe(record.get("cached", 0), record["seconds"]),
            prompt=self._shorten(record["prompt"], PROMPT_CHARACTERS),
            answer=self._shorten(record.get("answer", ""), PROMPT_CHARACTERS),
            error=self._shorten(record.get("error", ""), PROMPT_CHARACTERS),
            turns=turns,
            others=self._select(list(chain.from_iterable(by_turn.values()))),
        )

    def _show_turn(self, number: int, turn: Json, queries: Sequence[Json]) -> ShownTurn:
        figures = _read_usage(turn.get("usage", {})).describe(seconds=turn.get("seconds")) or "no usage kept"
        texts = [
            (TURN_TEXTS[name], self._shorten(turn[name], TURN_CHARACTERS)) for name in TURN_TEXTS if turn.get(name)
        ]
        selected = self._select(queries, turn.get("queries", 0))
        return ShownTurn(number, bool(turn.get("failed")), figures, texts, selected)

    def _shorten(self, text: str, limit: int) -> str:
        """Return the text, shortened to the limit, which takes a part of the page's characters."""
        shortened = shorten(text, limit)
        self._free_characters -= len(shortened)
        return shortened


def _add_request(record: Json, line: Json) -> None:
    """Add a request to the record of its query. A query without turns has one request."""
    if not record:
        prompt = find_last_text(line["messages"]) if line["messages"] else ""
        record |= {name: line[name] for name in ("parent", "kind", "depth", "model")}
        record |= {"turn": line.get("asked_in", 0), "prompt": shorten(prompt, PROMPT_CHARACTERS)}
    if not line["turn"]:
        answer = shorten(line.get("answer", ""), PROMPT_CHARACTERS)
        record |= {"answer": answer, "error": line.get("error", ""), "seconds": line["seconds"]}
        record |= {"cached": int(line.get("cached", False)), **line.get("usage", {})}


def _read_usage(record: Json) -> Usage:
    names = ("calls", "prompt_tokens", "completion_tokens", "cost")
    return Usage(**{name: record[name] for name in names if name in record})
