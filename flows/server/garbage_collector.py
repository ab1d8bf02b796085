"""Garbage collection of a Prefect server in a thread of its own, so that its event loop never waits for its database.

Python collects cycles in whichever thread allocates, in a server mostly that of the event loop. A cursor of SQLite's in
such a cycle is reset as it goes, and waits for its connection: in Prefect's server (3.8, with aiosqlite 0.22) a later
statement of that connection may be waiting for a transaction that only the event loop can end, up to the minute of the
busy timeout, and the server answers nobody meanwhile. In another thread the same wait holds up nothing, for sqlite3
lets go of the interpreter's lock.
"""

import gc
import threading
import time

INTERVAL_SECONDS = 0.5
FULL_INTERVAL_SECONDS = 15.0
MIN_ALLOCATIONS = 700  # Python's own threshold: an idle server collects nothing


def collect_in_thread() -> None:
    """From now on this process's garbage is collected by a thread of its own. What is there already is never looked at.

    Twice a second what is young, and every quarter of a minute all of it, where as many objects have come since as
    Python itself waits for.
    """
    gc.collect()
    gc.freeze()  # the modules, which a full collection would go through each time
    gc.disable()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    full = time.monotonic()
    while True:
        time.sleep(INTERVAL_SECONDS)
        if gc.get_count()[0] < MIN_ALLOCATIONS:
            continue
        is_full = time.monotonic() - full >= FULL_INTERVAL_SECONDS
        gc.collect(2 if is_full else 1)
        if is_full:
            full = time.monotonic()
