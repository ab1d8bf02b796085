"""Scripted turns of a recursive language model."""

from __future__ import annotations

import itertools
from textwrap import dedent

from ..standins.openai_chat import Reply, Request, Script

MARK = "You answer a question by writing Python"  # each request for a turn has this text, and no flat query has it
# Code whose own error does not say why the process that it started failed.
FAILING_CHILD = (
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'raise ValueError(\"of the child\")'], check=True)"
)
DSPY_MARK = "[[ ## code ## ]]"  # the same for DSPy's recursive models


def format_turn(code: str) -> str:
    """Return an answer whose code is run."""
    return f"Let me see.\n\n```python\n{dedent(code).strip()}\n```"


def format_dspy_turn(code: str) -> str:
    """Return an answer whose code DSPy runs."""
    return f"[[ ## reasoning ## ]]\n{format_turn(code).replace('```python', DSPY_MARK + chr(10) + '```python')}"


def make_hanging_script(code: str, turns: int) -> Script:
    """Return a script that answers so many requests with the same turn, and no further one."""
    numbers = itertools.count(1)
    return lambda _: format_turn(code) if next(numbers) <= turns else Reply("never sent", delay=1000)


def make_script(*turns: tuple[str, str | Reply], is_dspy: bool = False) -> Script:
    """Return a script for recursive models: the first pair whose text the request contains provides the turn's code.

    Flat queries are left to the server's rules. With `is_dspy`, the models are those of `dspy.RLM`.
    """
    mark, write = (DSPY_MARK, format_dspy_turn) if is_dspy else (MARK, format_turn)

    def script(request: Request) -> Reply | str | None:
        if mark not in request.text:
            return None
        for text, code in turns:
            if text in request.text:
                return code if isinstance(code, Reply) else write(code)
        raise AssertionError(f"no turn is scripted for {request.text[-2000:]}")

    return script
