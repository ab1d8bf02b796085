"""The interpreter's synchronous face, for scripts: the same, on one background event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .interpreter import Interpreter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from .contract import Sandbox
    from .result import Result

T = TypeVar("T")
CONTEXT = "main"


class _Background:
    """One event loop in one daemon thread, for every interpreter of the process; made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop and waits. An interrupt here (Ctrl-C) cancels it there, and waits for its clean-up."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="rlm-batch", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                ended = threading.Event()
                future.add_done_callback(lambda _: ended.set())
                future.cancel()
                ended.wait(10)
            raise


_background = _Background()


class BlockingInterpreter:
    """Runs code in one sandbox, step by step: names that one execution defines are there in the next.

    A context manager; or `start`, `execute` and `shutdown` by hand. Safe to use from several threads, one execution at
    a time. `timeout` is the default for each execution, in seconds. `tools` are functions of the host that the code
    may call by name.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.tools: dict[str, Callable[..., Any]] = {} if tools is None else tools
        self._timeout = timeout
        self._open = open_sandbox
        self._interpreter: Interpreter | None = None

    def start(self) -> Self:
        """Opens the sandbox; the second time does nothing, and after `shutdown` it opens a new one.

        Raises SandboxStartError, QuotaExceeded or ConfigurationError.
        """
        _background.run(self._start())
        return self

    def execute(self, code: str, variables: dict[str, Any] | None = None, *, timeout: float | None = None) -> Result:
        """Runs the code and returns what it submitted. Parameters and errors are those of `Interpreter.execute`."""
        return _background.run(self._execute(code, variables, timeout))

    def shutdown(self) -> None:
        """Removes the sandbox, whatever it is doing; the second time does nothing."""
        _background.run(self._shutdown())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _start(self) -> Interpreter:
        if self._interpreter is None:
            self._interpreter = Interpreter(self._open, timeout=self._timeout, tools=self.tools)
        await self._interpreter.start()
        return self._interpreter

    async def _execute(self, code: str, variables: dict[str, Any] | None, timeout: float | None) -> Result:
        interpreter = await self._start()
        return await interpreter.execute(code, variables, timeout=timeout, context=CONTEXT)

    async def _shutdown(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.shutdown()
