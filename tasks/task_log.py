"""The log of our task runs: the code's output, line by line while the code runs, up to a limit.

The logger is `prefect.task_runs.output`. Its records go to the server, in batches, and to the console, as Prefect's own
records do. Standard output has the level INFO, and standard error WARNING. The number of lines is limited, because each
line is a record to send and a row in the server's database. The result's `meta.stdout` and `meta.stderr`, and the
ledger, have lines that the log omits.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect.logging import get_run_logger

from ..sandbox.outcomes.text_escape import escape_text
from .redrawn_lines import RedrawnLines

MAX_LINES = 200  # lines of one attempt at an execution
MAX_LINE_CHARACTERS = 1000
Logger = logging.Logger | logging.LoggerAdapter[Any]
LEVELS = {"stdout": logging.INFO, "stderr": logging.WARNING}


@dataclass(slots=True)
class LineBudget:
    """The number of lines that a flow run may still log."""

    remaining_lines: int = 10_000


class OutputLog:
    """A log of the output of one attempt, by default in the child `output` of the run's logger."""

    def __init__(self, budget: LineBudget, prefix: str = "", logger: Logger | None = None) -> None:
        self._budget = budget
        self._prefix = prefix
        run_logger: Any = logger or get_run_logger()
        self._logger: Logger = logger or run_logger.getChild("output")
        self._remaining_lines = MAX_LINES
        self._omitted_count = 0
        self._lines = defaultdict[str, RedrawnLines](partial(RedrawnLines, MAX_LINE_CHARACTERS + 1))  # keys: streams

    def write(self, stream: str, text: str) -> None:
        """Log the lines that are complete, and keep the rest for later."""
        for line in self._lines[stream].feed(text):
            self._log_line(stream, line)

    def close(self) -> None:
        """Log an unfinished last line, and the number of omitted lines."""
        for stream, lines in self._lines.items():
            for line in lines.finish():
                self._log_line(stream, line)
        if self._omitted_count:
            text = "%s%d more lines are left out of this log; the result's meta has the first and the last"
            self._logger.info(text, self._prefix, self._omitted_count)

    def _log_line(self, stream: str, line: str) -> None:
        if not line.strip() or not self._logger.isEnabledFor(LEVELS[stream]):
            return
        if self._remaining_lines <= 0 or self._budget.remaining_lines <= 0:
            self._omitted_count += 1
            return
        self._remaining_lines -= 1
        self._budget.remaining_lines -= 1
        line = escape_text(line, keep="\t")
        more = "..." if len(line) > MAX_LINE_CHARACTERS else ""
        self._logger.log(LEVELS[stream], "%s%s%s", self._prefix, line[:MAX_LINE_CHARACTERS], more)
