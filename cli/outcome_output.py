"""What a command prints of outcomes beside their table: what the code has printed, or JSON for another program."""

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
    """How a person wants outcomes printed: with all that the code has printed, or as JSON in the place of the table."""

    shows_output: bool = False
    is_json: bool = False


def print_json_lines(outcomes: Iterable[Outcome], best: Sequence[Result] = ()) -> None:
    """Prints a line of JSON for each outcome on standard output: what a ledger has of it; `best` says so in its own."""
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
    """Print an object as a line of strict JSON, whatever the encoding, which a terminal can show."""
    is_unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "ascii").name.startswith("utf-8")
    print(escape_json(json.dumps(value, ensure_ascii=not is_unicode, allow_nan=False)))


def print_outputs(outcomes: Iterable[Outcome]) -> None:
    """Prints what each execution's code has printed on standard output, under the execution's number."""
    for outcome in outcomes:
        for name, text in (("", outcome.meta.stdout), (" standard error", outcome.meta.stderr)):
            if text:
                print(f"\n{outcome.meta.index}{name}:")
                print(escape_text(text.rstrip("\n"), keep=LINE_CHARACTERS))
