"""The metadata of an execution: its sandbox, output, times and queries."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QuerySummary:
    """The queries of an execution.

    Attributes:
        asked: Number of queries.
        failed: Number of queries that failed.
        unsolved: Number of failed queries whose recursive model submitted no answer within its turns.
        calls: Number of answered calls to the model, including a recursive model's own turns.
        prompt_tokens: Tokens of these calls' prompts.
        completion_tokens: Tokens of these calls' answers.
        cost: Cost of these calls in US dollars; None if a price is unknown.
        cached: Number of questions answered from the cache. They do not count as calls.
        usage_by_model: Calls, tokens and cost of each model, by its name.
        tree: Records of the first thousand queries, as a tree. Each has the `turn` that asked it, the beginning of its
            `prompt` (200 characters) and its `answer` as text (2,000 characters), or its `error`.
    """

    asked: int = 0
    failed: int = 0
    unsolved: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0
    cached: int = 0
    usage_by_model: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    tree: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: "QuerySummary") -> "QuerySummary":
        """Return the sums, without the trees."""
        usage_by_model = dict(self.usage_by_model)
        for name, usage in other.usage_by_model.items():
            earlier = usage_by_model.get(name, {})
            usage_by_model[name] = {key: _add_known(earlier.get(key, 0), value) for key, value in usage.items()}
        names = ("asked", "failed", "unsolved", "calls", "prompt_tokens", "completion_tokens", "cached")
        counts: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return QuerySummary(**counts, cost=_add_known(self.cost, other.cost), usage_by_model=usage_by_model)


def _add_known(first: float | None, second: float | None) -> float | None:
    """Return the sum of two numbers, or None if one of them is unknown."""
    return None if first is None or second is None else first + second


NOTHING_ASKED = QuerySummary()


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of an execution.

    Attributes:
        index: Number of the execution, from 0; None for `run_code` and interpreters.
        variables: Variables of the code.
        provider: Name of the provider.
        sandbox_id: The provider's id of the sandbox.
        submitted: True if the code called `SUBMIT`.
        exited: True if the code called `sys.exit` with the status of success before `SUBMIT`.
        seconds: Run time of the code by the sandbox's monotonic clock.
        cpu_seconds: CPU seconds of the code's process and of the processes that it waited for, as the kernel counts
            them. In a context, code can falsify them. None if the sandbox's kernel does not count them.
        peak_mib: Largest resident memory of one of these processes, in MiB. It includes the memory that the process
            inherited from `prepare` or from earlier steps of a sequence. None if the kernel does not count it.
        attempt: Number of the attempt, from 1.
        earlier_errors: Errors of the earlier attempts.
        stdout: Output of the code. Over the cap, only its start and end are kept, with a line that counts the dropped
            characters.
        stderr: Error output of the code, capped like `stdout`.
        isolation: Isolation level of the sandbox.
        layers: Mechanisms that the isolation consists of.
        files: Paths on the volume that the code wrote, at most 1,000. Files that a subprocess wrote are missing.
        queries: Summary of the queries to a language model.
        reports: Steps and values that the code reported.
        pruned: True if the sweep ended the code after its last report.
        tool_calls: Number of calls of each tool, for code of a flow run.
        value: Value of the last statement as JSON of at most 1 MiB, if the statement is an expression.
        value_repr: The first 20,000 characters of that value's `repr`, if the value is not JSON or is too large.
        displays: Displays of the code, as in Jupyter: dicts of MIME types and data, with bytes as base64. They have at
            most 4 MiB together, and a text says which data was dropped.
        collected: Host paths of the collected files, or their locations if the results are at a location.
        not_collected: One sentence for each file that was not collected, with the reason.
        judged: Data that a check has judged: `outputs` and `submitted` of the code, its `error` as the check found it
            or None, and the check's own `check_seconds`, `check_stdout` and `check_stderr`. None without a check.
        group: Number of the input, point or chunk, from 0, in a run with `repeats`; otherwise None.
        repeat: Number of the repeat, from 0, in a run with `repeats`; otherwise None.
        kept_until: Time until which `keep_failed` keeps the sandbox, in epoch seconds; None if it was not kept.
        ended_at: Time of the host's clock when the attempt ended, in epoch seconds; None for `run_code` and
            interpreters.
        is_reduction: True for the outcome of `reduce` or `summarize`.
    """

    index: int | None = None
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    provider: str = ""
    sandbox_id: str = ""
    isolation: str = ""
    layers: tuple[str, ...] = ()
    seconds: float = 0.0
    attempt: int = 1
    earlier_errors: tuple[str, ...] = ()
    submitted: bool = False
    stdout: str = ""
    stderr: str = ""
    files: tuple[str, ...] = ()
    queries: QuerySummary = NOTHING_ASKED
    reports: tuple[tuple[int, float], ...] = ()
    pruned: bool = False
    value: Any = None
    value_repr: str | None = None
    displays: tuple[dict[str, Any], ...] = ()
    tool_calls: dict[str, int] = field(default_factory=dict[str, int])
    collected: tuple[str, ...] = ()
    not_collected: tuple[str, ...] = ()
    judged: dict[str, Any] | None = None
    group: int | None = None
    repeat: int | None = None
    exited: bool = False
    cpu_seconds: float | None = None
    peak_mib: float | None = None
    kept_until: float | None = None
    ended_at: float | None = None
    is_reduction: bool = False

    @property
    def printed(self) -> str:
        """Return the code's output, followed by its error output."""
        needs_line_end = self.stdout and not self.stdout.endswith("\n")
        if needs_line_end and self.stderr:
            return f"{self.stdout}\n{self.stderr}"
        return self.stdout + self.stderr
