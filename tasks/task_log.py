"""What code writes, live in its task run's log: line by line, as it comes, and no more than a person would read.

Its logger is `prefect.task_runs.output`, whose records go where Prefect's own go: to the server, in batches, and to the
console. Standard output is INFO, standard error WARNING. Each line is a record to send and a row in the server's
database; hence the bounds. The result's `meta.stdout` and `meta.stderr`, and the ledger, have what the log has not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from ..sandbox.text_escape import escape_text

MAX_LINES = 200  # of one attempt at an execution
MAX_LINE_CHARACTERS = 1000  # characters of a line
LEVELS = {"stdout": logging.INFO, "stderr": logging.WARNING}


class LineBudget:
    """How many lines a flow run may still log: ten thousand, more than anyone reads."""

    def __init__(self, left: int = 10_000) -> None:
        self.remaining_lines = left


class OutputLog:
    """Takes what one attempt at an execution writes. `write` is an `on_output`; `close` says what was left out."""

    def __init__(self, run: LineBudget, prefix: str = "") -> None:
        self._run = run
        self._prefix = prefix
        self._log = _logger()
        self._left = MAX_LINES
        self._cut = 0
        self._rest = dict.fromkeys(LEVELS, "")

    def write(self, stream: str, text: str) -> None:
        """Logs the lines that are complete, and keeps the rest for later."""
        *lines, rest = (self._rest[stream] + text).split("\n")
        # No line break for long: what is kept is bounded too.
        self._rest[stream] = rest[: MAX_LINE_CHARACTERS + 1]
        for line in lines:
            self._line(stream, line)

    def close(self) -> None:
        """Logs what came without a line's end, and how many lines were left out."""
        for stream, rest in self._rest.items():
            if rest:
                self._line(stream, rest)
                self._rest[stream] = ""
        if self._cut and self._log is not None:
            self._log.log(
                logging.INFO,
                "%s%d more lines are not in this log; the result's meta has the first and the last that were written",
                self._prefix,
                self._cut,
            )

    def _line(self, stream: str, line: str) -> None:
        if self._log is None or not line.strip() or not self._log.isEnabledFor(LEVELS[stream]):
            return
        if self._left <= 0 or self._run.remaining_lines <= 0:
            self._cut += 1
            return
        self._left -= 1
        self._run.remaining_lines -= 1
        # What redraws a line with carriage returns, as progress bars do, is told as it was last.
        said = escape_text(line.rstrip("\r").rpartition("\r")[2][: MAX_LINE_CHARACTERS + 1], keep="\t")
        self._log.log(
            LEVELS[stream],
            "%s%s",
            self._prefix,
            said if len(said) <= MAX_LINE_CHARACTERS else said[:MAX_LINE_CHARACTERS] + "...",
        )


def _logger() -> logging.LoggerAdapter[Any] | None:
    """The run's own, below which a level of its own can be set; None outside a run."""
    try:
        logger: Any = get_run_logger()
    except MissingContextError:
        return None
    child: Callable[[str], logging.LoggerAdapter[Any]] = logger.getChild
    return child("output")
