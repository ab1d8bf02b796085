"""What a script hears of its code's output while that runs."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..errors import ConfigurationError

OnOutput = Callable[[str, str], object]

log = logging.getLogger("rlm_batch.interpreter")


class OutputListener:
    """Calls a function with each piece of output: the stream's name and the text.

    One that raises an Exception is not called again, and nothing else comes of that but a line in the log. Raises
    ConfigurationError for what cannot be called so.
    """

    def __init__(self, on_output: OnOutput) -> None:
        if not callable(on_output) or inspect.iscoroutinefunction(on_output):
            raise ConfigurationError(
                "on_output is a plain function of the stream's name and the text: for async code have it put them into "
                "a queue"
            )
        self._on_output: OnOutput | None = on_output

    def hear(self, stream: str, text: str) -> None:
        """Hands on a piece of output."""
        if self._on_output is None:
            return
        try:
            self._on_output(stream, text)
        except Exception as error:  # noqa: BLE001 - the code's result is not to be lost for it
            self._on_output = None
            log.warning(
                "on_output raised %s: %s; it is called no more for this execution, whose result has all output in its "
                "meta",
                *(type(error).__name__, error),
            )


class OutputQueue:
    """Output that comes on one thread and is heard on another: the one that waits for the execution."""

    def __init__(self, on_output: OnOutput) -> None:
        self._listener = OutputListener(on_output)
        self._queue: SimpleQueue[tuple[str, str] | None] = SimpleQueue()

    def put(self, stream: str, text: str) -> None:
        """Notes a piece of output. It does not wait."""
        self._queue.put((stream, text))

    def wake(self) -> None:
        """Ends a wait."""
        self._queue.put(None)

    def wait(self, timeout: float) -> None:
        """Hands on the next piece, for which it waits that many seconds at most."""
        with suppress(Empty):
            piece = self._queue.get(timeout=timeout)
            if piece is not None:
                self._listener.hear(*piece)

    def deliver(self) -> float:
        """Hands on what there is; returns the seconds that this took."""
        if self._queue.empty():
            return 0.0
        since = time.monotonic()
        while not self._queue.empty():
            self.wait(0.0)
        return time.monotonic() - since
