"""Outcomes on standard output besides their table: the text that code printed, or JSON for other programs."""

import codecs
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..sandbox.outcomes.text_escape import LINE_CHARACTERS, escape_json, escape_text
from ..sandbox.result import Outcome


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of printed outcomes: with the text that the code printed, or as JSON instead of a table."""

    shows_output: bool = False
    is_json: bool = False


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
