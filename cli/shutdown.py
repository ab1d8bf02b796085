"""A Prefect server that went away while a flow ran, and the end of the command that ran it."""

from __future__ import annotations

import os
import sys
import threading

DELIVERY_SECONDS = 10.0  # seconds for a server that only failed once


class ServerGone(Exception):
    """The server failed or went away while the flow ran, and could not be told how it ended."""


def exit_after_delivery(status: int) -> None:
    """Ends the process with that status after some seconds, if it has not ended by then.

    Prefect's client delivers its events at the end of a process, three of each task run, and tries each for some 8 s:
    after a run of sixty executions the process would be there for another 24 minutes.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(DELIVERY_SECONDS, end)
    timer.daemon = True
    timer.start()
