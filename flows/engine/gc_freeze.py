"""Python's collector of garbage, while a flow run has its executions under way."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_FROZEN_BY_OTHERS = (
    1000  # objects that the collector passes over by itself, or fewer: more, and the program has set some aside
)

_lock = threading.Lock()
_runs = 0


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Within this the collector passes over what was there before: the program, Prefect and a provider's SDK.

    Those are some 300,000 objects, and to look through them once takes a quarter of a second in which no execution gets
    on. What has become garbage among them meanwhile is found afterwards.
    """
    global _runs
    with _lock:
        if _runs == 0 and gc.get_freeze_count() > MAX_FROZEN_BY_OTHERS:
            ours = False
        else:
            ours, _runs = True, _runs + 1
            if _runs == 1:
                gc.freeze()
    try:
        yield
    finally:
        if ours:
            with _lock:
                _runs -= 1
                if _runs == 0:
                    gc.unfreeze()
