"""Outcomes on standard output besides their table: the text that code printed, or JSON for other programs."""

import codecs
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..sandbox.outcomes.outcome_json import outcome_to_json
from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_json, escape_text
from ..sandbox.result import Outcome, Result


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of printed outcomes: with the text that the code printed, or as JSON instead of a table."""

    shows_output: bool = False
    is_json: bool = False


def print_json_lines(outcomes: Iterable[Outcome], best: Sequence[Result] = ()) -> None:
    """Print a line of JSON for each outcome, with the fields of a ledger line. Lines of `best` have `"best": true`."""
    best_numbers = {result.meta.index for result in best}
    for outcome in outcomes:
        line: dict[str, Any] = {
            "index": outcome.meta.index,
            "status": "succeeded" if isinstance(outcome, Result) else "failed",
            **({"best": True} if outcome.meta.index in best_numbers else {}),
            **outcome_to_json(outcome),
        }
        print_json(line)


def print_json(value: dict[str, Any]) -> None:
    """Print an object as a line of strict JSON, safe for terminals and for any output encoding."""
    is_unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "ascii").name.startswith("utf-8")
    print(escape_json(json.dumps(value, ensure_ascii=not is_unicode, allow_nan=False)))


def print_outputs(outcomes: Iterable[Outcome]) -> None:
    """Print the text that each execution's code printed, under the execution's number."""
    for outcome in outcomes:
        for name, text in (("", outcome.meta.stdout), (" standard error", outcome.meta.stderr)):
            if text:
                print(f"\n{outcome.meta.index}{name}:")
                print(escape_text(text.rstrip("\n"), keep=LINE_CHARACTERS))
