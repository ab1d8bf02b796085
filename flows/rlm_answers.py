"""The reports of the rlm flow: the answer to one question, and the answers to many."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..sandbox.errors import RlmBatchError
from ..sandbox.meta import NOTHING_ASKED, QuerySummary
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_text
from ..sandbox.queries.answer_type import AnswerType
from ..sandbox.queries.records import read_answer
from ..sandbox.result import Outcome, Result
from .reporting.columns import Tables
from .reporting.report import describe_usage
from .reports import Report


@dataclass(frozen=True, slots=True)
class RlmAnswer(Report[Outcome]):
    """A recursive language model's answer. It prints as the answer alone, without commands for a terminal.

    Attributes:
        answer: The answer as text. Without an answer, the output of the last turn that printed something.
        trajectory: A dict with reasoning, code and output for each turn.
        queries: Number, tokens and cost of the queries to the model, and all queries as a tree.
        result: The question's outcome: a `Result`, or a `Failure` without an answer.
        results_path: The ledger's directory or location.
        answered: False if the model submitted no answer within its turns, or a budget, depth or time limit ended it.
        error: Without an answer, a `CodeError` with a `type` such as "BudgetExceeded", which names the parameter to
            raise.
        value: The answer as the code submitted it: a text, or another JSON value, which `answer` has as text. With an
            `output_type`, a value of that type. None without an answer.
    """

    answer: str
    trajectory: list[dict[str, Any]]
    queries: QuerySummary
    result: Outcome
    results_path: str
    answered: bool = True
    error: RlmBatchError | None = None
    value: Any = None

    @classmethod
    def from_outcome(cls, outcome: Outcome, results_path: str, answer_type: AnswerType | None = None) -> Self:
        """Return the answer that an execution gave. With a type, its value has this type."""
        answer, value, trajectory = read_answer(outcome, answer_type)
        error = None if isinstance(outcome, Result) else outcome.error
        queries = outcome.meta.queries
        return cls(answer, trajectory, queries, outcome, results_path, error is None, error, value)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Return a list of the one outcome."""
        return [self.result]

    @property
    def query(self) -> str:
        """Return the question."""
        return self.result.meta.variables.get("query", "")

    def rows(
        self, limit: int | None = None, *, shows_output: bool = False, shows_usage: bool = False
    ) -> list[list[str]]:
        """Return no table: an answer is printed as text."""
        return []

    def describe(self) -> str:
        """Return the answer, or the model's last output; empty if there is neither."""
        if self.answered or not self.answer:
            return str(self)
        return f"No answer. The model's last output:\n{self}"

    def list_notes(self) -> list[str]:
        """Return a sentence about the turns and the calls of the model."""
        calls = describe_usage(self.queries, self.queries.cached)
        return [f"{len(self.trajectory)} turns; the model was called {calls}"]

    def to_json_lines(self) -> Iterator[dict[str, Any]]:
        """Yield one object: the answer with its trajectory and its queries."""
        error = None if self.error is None else self.error.summary
        answer = {"answer": self.answer, "answered": self.answered, "error": error}
        yield {**answer, "trajectory": self.trajectory, "queries": asdict(self.queries)}

    def __str__(self) -> str:
        return escape_text(self.answer, keep=LINE_CHARACTERS)


@dataclass(frozen=True, slots=True)
class RlmAnswers(Report[RlmAnswer]):
    """The answers to many questions, in order. The report prints as a table.

    Attributes:
        results: A `Result` for each question, in order, or a `Failure` for each that has no answer.
        queries: The counts, tokens and cost of all questions' queries, added up. Its `tree` is empty.
        results_path: The ledger's directory or location.
        answer_type: The type of the answers, or None.
    """

    results: Sequence[Outcome]
    queries: QuerySummary
    results_path: str
    answer_type: AnswerType | None = None
    _tables = Tables.RUN | Tables.QUESTIONS

    @classmethod
    def from_outcomes(
        cls, results: Sequence[Outcome], results_path: str, answer_type: AnswerType | None = None
    ) -> Self:
        """Return the report on the outcomes of all questions."""
        queries = sum((outcome.meta.queries for outcome in results), NOTHING_ASKED)
        return cls(results, queries, results_path, answer_type)

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Return the outcomes, in order."""
        return self.results

    def list_notes(self) -> list[str]:
        """Return a sentence about the calls of the model for all questions."""
        return [f"{len(self)} questions; the model was called {describe_usage(self.queries, self.queries.cached)}"]

    def to_dataframe(self, by: str | Sequence[str] | None = None) -> Any:
        """Return a pandas DataFrame with a row for each question.

        Args:
            by: The variable, or the variables, whose values name a row, as in other reports. Default: None.

        Returns:
            A `pandas.DataFrame`. With an `output_type`, its column `value` has the answers as values of this type.

        Raises:
            ConfigurationError: pandas is not installed, or a question lacks a variable.
        """
        frame = Report.to_dataframe(self, by)  # `super()` fails in a class with slots from `dataclass`.
        if self.answer_type is not None and not by:
            frame["value"] = [answer.value for answer in self]
        return frame

    def _make_item(self, outcome: Outcome) -> RlmAnswer:
        return RlmAnswer.from_outcome(outcome, self.results_path, self.answer_type)
