"""The settings of every Prefect server that rlm-batch starts: its own, and the one that Prefect embeds in a program.

Measured on two cores, 500 task runs: the recorder in batches takes a task run from 25 to 9 ms of the server's CPU, and
all of them are recorded 2 s after the last instead of 11 s. An empty PREFECT_HOME makes the first start migrate a
database for 16 to 28 s, for which Prefect's own 20 s are too few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def server_environment() -> dict[str, str]:
    """The environment for a server's process: this one's, and ours where a person has not said otherwise."""
    return {**SERVER_SETTINGS, **os.environ}


@contextmanager
def for_embedded_server() -> Iterator[None]:
    """Within this a server that Prefect embeds is started with our settings.

    Its process inherits this one's environment; the time that is waited for it comes from Prefect's settings, which
    may have been read before we were imported.
    """
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as TIMEOUT
    from prefect.settings import temporary_settings

    added = {name: value for name, value in SERVER_SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    defaults: dict[Any, Any] = {TIMEOUT: int(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])}
    try:
        with temporary_settings(set_defaults=defaults):
            yield
    finally:
        for name in added:
            os.environ.pop(name, None)
