"""Scripted turns of a recursive language model, in the form that DSPy reads."""

from __future__ import annotations

from textwrap import dedent

from ..standins.openai_chat import Reply, Request, Script

MARK = "[[ ## code ## ]]"  # each request for a turn has this text, and no flat query has it


def format_turn(code: str) -> str:
    """Return an answer whose code DSPy runs."""
    return (
        f"[[ ## reasoning ## ]]\nLet me see.\n\n{MARK}\n```python\n{dedent(code).strip()}\n```\n\n[[ ## completed ## ]]"
    )


def make_script(*turns: tuple[str, str | Reply]) -> Script:
    """Return a script for recursive models: the first pair whose text the request contains provides the turn's code.

    Flat queries are left to the server's rules.
    """

    def script(request: Request) -> Reply | str | None:
        if MARK not in request.text:
            return None
        for text, code in turns:
            if text in request.text:
                return code if isinstance(code, Reply) else format_turn(code)
        raise AssertionError(f"no turn is scripted for {request.text[-2000:]}")

    return script
