"""What a flow run's log says of an error of ours: its text, which is written for people, without a traceback."""

from __future__ import annotations

import logging

from ..sandbox.errors import RlmBatchError


class _ErrorTextFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, RlmBatchError):
            record.exc_info = record.exc_text = None
            record.msg, record.args = "%s: %s", (type(error).__name__, error)
        return True


_ERROR_TEXT_FILTER = _ErrorTextFilter()


def install_error_log_filter() -> None:
    """From now on in this process. Where what raised is no error of ours, the log has its traceback as before."""
    logging.getLogger("prefect.flow_runs").addFilter(_ERROR_TEXT_FILTER)
