"""The log of our task runs: the code's output, line by line while the code runs, up to a limit.

The logger is `prefect.task_runs.output`. Like Prefect's own records, its records go to the console, and in batches to
the server. Standard output has the level INFO, and standard error WARNING. The number of lines is limited, because each
line is a row in the server's database. The ledger, and `meta.stdout` and `meta.stderr` of the result, also have lines
that the log omits.
"""

import logging
from dataclasses import dataclass
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
        if logger is None:
            run_logger: Any = get_run_logger()
            self._logger: Logger = run_logger.getChild("output")
        else:
            self._logger = logger
        self._remaining_lines = MAX_LINES
        self._omitted_count = 0
        # One character more than the limit shows whether a line is too long.
        self._parsers = {stream: RedrawnLines(MAX_LINE_CHARACTERS + 1) for stream in LEVELS}

    def write(self, stream: str, text: str) -> None:
        """Log the lines that are complete, and keep the unfinished line for later."""
        for line in self._parsers[stream].feed(text):
            self._log_line(stream, line)

    def close(self) -> None:
        """Log an unfinished last line, and the number of omitted lines."""
        for stream, parser in self._parsers.items():
            for line in parser.finish():
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
        text = escape_text(line, keep="\t")
        ellipsis = "..." if len(text) > MAX_LINE_CHARACTERS else ""
        self._logger.log(LEVELS[stream], "%s%s%s", self._prefix, text[:MAX_LINE_CHARACTERS], ellipsis)
