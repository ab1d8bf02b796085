"""What is known of an execution beside what it submitted: its sandbox, its output, its times, its queries."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QuerySummary:
    """The queries of an execution: how many were `asked` and how many of them failed; the model's `calls` that were
    answered, with their tokens and cost (US dollars, None where a price is unknown), a recursive model's own turns
    included; how many questions were answered from the cache and are no calls (`cached`); and the queries as a `tree`
    of records, the first thousand of them.
    """

    asked: int = 0
    failed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0
    cached: int = 0
    tree: tuple[dict[str, Any], ...] = ()


NOTHING_ASKED = QuerySummary()


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of an execution beside what it submitted.

    `seconds` is how long the code ran, by the sandbox's own monotonic clock. `attempt` counts from 1, and
    `earlier_errors` says how those before it failed. `stdout` and `stderr` are the first and the last half of what the
    code wrote, where it wrote more than the cap; a line between them says how much was dropped. `isolation` is the
    level that was in force, `layers` what it was made of. `files` are the paths on the volume of what the code wrote
    there, as far as its own Python knew (a subprocess's are not among them), 1,000 at most. `queries` says what was
    asked of a language model. `reports` are the steps and values that the code reported, `pruned` says that its sweep
    ended it after the last of them. `tool_calls` says how often the code of a flow run called each of its tools.

    `value` is what the last statement of the code came to, where that is an expression, as JSON and of at most 1 MiB;
    where it is none of that `value_repr` is its `repr`, 20,000 characters of it. `displays` are what the code has
    shown, as Jupyter has it: dicts of MIME types and data, bytes as base64, 4 MiB together; what is over is named in
    its text.

    `collected` are the files that were brought home, by their paths on the host, which are locations where results are
    at one; `not_collected` says in a sentence each which were not, and why.
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
