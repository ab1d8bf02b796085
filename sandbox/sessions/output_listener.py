"""Delivery of output to a script while its code runs."""

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
    """A listener that calls a function with each piece of output: the stream's name and the text.

    If the function raises an Exception, the listener logs it and does not call the function again.

    Raises:
        ConfigurationError: The function is not callable or is async.
    """

    def __init__(self, on_output: OnOutput) -> None:
        if not callable(on_output) or inspect.iscoroutinefunction(on_output):
            raise ConfigurationError(
                "on_output must be a plain function of the stream's name and the text: in async code, "
                "put the text into a queue"
            )
        self._on_output: OnOutput | None = on_output

    def hear(self, stream: str, text: str) -> None:
        """Call the function with a piece of output."""
        if self._on_output is None:
            return
        try:
            self._on_output(stream, text)
        except Exception as error:  # noqa: BLE001 - a failing listener must not lose the code's result
            self._on_output = None
            log.warning(
                "on_output raised %s: %s; it is not called again for this execution, and the result's "
                "meta has all output",
                type(error).__name__,
                error,
            )


class OutputQueue:
    """A queue that brings output to the thread that waits for the execution, where it calls `on_output`."""

    def __init__(self, on_output: OnOutput = lambda _stream, _text: None) -> None:
        self._listener = OutputListener(on_output)
        self._queue: SimpleQueue[tuple[str, str] | None] = SimpleQueue()

    def put(self, stream: str, text: str) -> None:
        """Queue a piece of output without waiting."""
        self._queue.put((stream, text))

    def wake(self) -> None:
        """End a call of `wait` in another thread."""
        self._queue.put(None)

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the next piece, and deliver it."""
        with suppress(Empty):
            piece = self._queue.get(timeout=timeout)
            if piece is not None:
                self._listener.hear(*piece)

    def deliver(self) -> float:
        """Deliver all queued output, and return the seconds that this took."""
        if self._queue.empty():
            return 0.0
        began_at = time.monotonic()
        while not self._queue.empty():
            self.wait(0.0)
        return time.monotonic() - began_at
