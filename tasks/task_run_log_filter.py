"""A log filter that keeps the start and the end of our task runs out of the log."""

from __future__ import annotations

import logging

from .execute import EXECUTE_TASK_NAME
from .query_task import QUERY_TASK_NAME
from .read_markers_task import READ_MARKERS_TASK_NAME


class _TaskRunLogFilter(logging.Filter):
    """Drops Prefect's lines on a task run's start and end: its state says so, and they double what it costs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or getattr(record, "task_name", None) not in (
            EXECUTE_TASK_NAME,
            QUERY_TASK_NAME,
            READ_MARKERS_TASK_NAME,
        )


def install_task_run_log_filter() -> None:
    """Keeps the start and the end of our task runs out of the log. Calling it again changes nothing."""
    logger = logging.getLogger("prefect.task_runs")
    if not any(isinstance(present, _TaskRunLogFilter) for present in logger.filters):
        logger.addFilter(_TaskRunLogFilter())
