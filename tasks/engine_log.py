"""Prefect's own log lines about our flow runs and task runs: what happened is one line, without our internals.

Prefect logs each exception with its traceback, and then the state with the same text. It has no setting for this. The
filters here know our runs by their ids, and the lines by Prefect's modules. All other lines stay as they are: those of
a user's flows and tasks, whatever their names, and those that a user's function logs within one of our flow runs.
"""

import logging

from ..sandbox.errors import RlmBatchError

EXECUTE_TASK_NAME = "execute"
QUERY_TASK_NAME = "query"
TASK_NAMES = {EXECUTE_TASK_NAME, QUERY_TASK_NAME}
CANCELLED_STATE = "Finished in state Cancelled("
FAILED_STATE = "Finished in state Failed("
RETURNED_STATE = "Task run failed with state: "  # begins a line that the line on the state repeats

_own_runs: set[str] = set()  # ids of the flow runs of our flows, and of the task runs of `run_code`


def shorten_engine_log(run_id: str) -> None:
    """Shorten Prefect's lines about one of our flow runs, or about a task run of `run_code`, in this process."""
    _own_runs.add(run_id)
    # Adding a filter again has no effect.
    logging.getLogger("prefect.flow_runs").addFilter(_shorten_flow_line)
    logging.getLogger("prefect.task_runs").addFilter(_is_wanted_task_line)
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.task_runs.output"):
        logging.getLogger(name).addFilter(_fill_in_message)


def _shorten_flow_line(record: logging.LogRecord) -> bool:
    """Make an error one line without a traceback. Return False for a line that repeats another, to omit it."""
    if record.module != "flow_engine" or getattr(record, "flow_run_id", None) not in _own_runs:
        return True
    error = _find_own_error(record)
    if error is not None:
        record.exc_info = record.exc_text = None
        record.msg, record.args = "%s: %s", (type(error).__name__, error)
        return True
    message = str(record.msg)
    repeats_another_line = message.startswith("Finished in state ") or _is_about_cancellation(message)
    return not repeats_another_line


def _is_wanted_task_line(record: logging.LogRecord) -> bool:
    """Return False for Prefect's lines on the start and the end of our task runs, and for tracebacks of our errors.

    These lines would double the cost of a task run, and its state says how it ended. The flow run's log has a line for
    each failure, up to a limit, and one line for a cancelled run. For `run_code`, Prefect's line on the state stays.
    """
    if record.module != "task_engine":
        return True
    has_own_error = _find_own_error(record) is not None
    if getattr(record, "task_run_id", None) in _own_runs:
        return not has_own_error
    name = getattr(record, "task_name", None)
    if name not in TASK_NAMES or getattr(record, "flow_run_id", None) not in _own_runs:
        return True
    message = str(record.msg)
    if _is_about_cancellation(message) or message.startswith(CANCELLED_STATE):
        return False
    if record.levelno <= logging.INFO:
        return False
    if name == EXECUTE_TASK_NAME:
        return not has_own_error and not message.startswith(FAILED_STATE)
    # The code may handle the failure of a query: one line without a traceback is enough.
    return not message.startswith(RETURNED_STATE)


def _fill_in_message(record: logging.LogRecord) -> bool:
    """Put the whole message of our line into `msg`: Prefect's JSON formatter shows `msg` without its arguments."""
    if {getattr(record, "flow_run_id", None), getattr(record, "task_run_id", None)} & _own_runs:
        record.msg, record.args = record.getMessage(), None
    return True


def _find_own_error(record: logging.LogRecord) -> RlmBatchError | None:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return error if isinstance(error, RlmBatchError) else None


def _is_about_cancellation(message: str) -> bool:
    """Return whether a line says that a run crashed because its caller was cancelled."""
    return "Execution was cancelled by the runtime environment" in message
