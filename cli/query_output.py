"""What code asked of a language model as a tree on standard output: each query, a recursive one's turns and its own."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..flows.reporting.document import Verbatim
from ..flows.reporting.report import describe_usage
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.queries.budget import Usage
from ..sandbox.result import Outcome

INDENT = "  "


def print_queries(outcomes: Iterable[Outcome]) -> None:
    """Prints the queries of each execution that asked any, under its number; of long texts as much as a page shows."""
    for outcome in outcomes:
        if outcome.meta.queries.tree:
            print(f"\n{outcome.meta.index}:")
        for record in outcome.meta.queries.tree:
            for line in _format_query(record):
                print(line)


def _format_query(record: dict[str, Any]) -> Iterator[str]:
    usage = Usage(*(record[name] for name in ("calls", "prompt_tokens", "completion_tokens", "cost")))
    where = f"{record['kind']} at depth {record['depth']}, {escape_text(record['model'])}"
    yield f"{where}, {record['seconds']:.1f} s, called {describe_usage(usage)}"
    yield from _format_text(record["prompt"], "? ")
    for number, turn in enumerate(record.get("trajectory", ()), 1):
        yield f"{INDENT}turn {number}"
        yield from _format_text(turn.get("reasoning") or "", f"{INDENT}# ")
        yield from _format_text(turn.get("code") or "", f"{INDENT}> ")
        yield from _format_text(turn.get("output") or "", f"{INDENT}| ")
    if record.get("error"):
        yield from _format_text(record["error"], "! ")
    for inner in record.get("queries", ()):
        for line in _format_query(inner):
            yield INDENT + line


def _format_text(text: str, mark: str) -> Iterator[str]:
    for line in Verbatim(text).excerpt.splitlines():
        yield f"{INDENT}{mark}{line}"
