"""A log filter that keeps the start and the end of our task runs out of the log."""

from __future__ import annotations

import logging

from .execute import EXECUTE_TASK_NAME
from .query_task import QUERY_TASK_NAME


def install_task_run_log_filter() -> None:
    """Keeps the start and the end of our task runs out of the log. Calling it again changes nothing."""
    logging.getLogger("prefect.task_runs").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    """False for Prefect's lines on a task run's start and end: its state says so, and they double what it costs."""
    return record.levelno > logging.INFO or getattr(record, "task_name", None) not in (
        EXECUTE_TASK_NAME,
        QUERY_TASK_NAME,
    )
