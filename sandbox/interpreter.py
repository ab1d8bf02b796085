"""The interpreter: the host's handle on the Python inside one open sandbox.

The core is async. Its synchronous face, for scripts, is in `sync_interpreter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .cancellation import run_shielded
from .errors import ConfigurationError, RlmBatchError, SandboxLost, SandboxStartError
from .protocol import FILE_OVER, START_TIMEOUT, Conversation, Frame, Pending, answer, arguments, limit, refusal, request
from .thread_pool import ThreadPool
from .wire.frames import BadFrameError
from .wire.names import OWN_FILE_PREFIX

if TYPE_CHECKING:
    from .provider_api import Channel, Sandbox
    from .queries import Queries
    from .result import Result


# The contexts that wait for the tool that is running here, with the interpreters that they are in.
_waiting_for_tool: contextvars.ContextVar[tuple[tuple[Interpreter, str | None], ...]]
_waiting_for_tool = contextvars.ContextVar("_waiting_for_tool", default=())


class Interpreter:
    """Runs code in one sandbox; `open_sandbox` is called once, by `start`, and what it opened is removed by `shutdown`.

    `timeout` is the default for each execution, in seconds; None means none. `tools` are functions of the host, plain
    or async, that the code may call by name; plain ones run in threads of their own, as many as there are calls.
    Executions may run at the same time, those of one context one after the other.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.timeout = timeout
        self.tools: dict[str, Callable[..., Any]] = {} if tools is None else tools
        self._open = open_sandbox
        self._conversation: Conversation | None = None
        self._channel: Channel | None = None
        self._contexts: dict[str, asyncio.Lock] = {}
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[None]] = {}  # by execution; 0 for the driver's own start
        self._calls: dict[int, set[asyncio.Task[None]]] = {}
        self._beats: asyncio.Task[None] | None = None
        self._ended = False
        self._spoke_at = self._heard_at = 0.0
        self._threads = ThreadPool()

    @property
    def sandbox(self) -> Sandbox:
        """The open sandbox. Raises SandboxLost where there is none."""
        if self._conversation is None:
            raise SandboxLost("there is no open sandbox: start the interpreter first")
        return self._conversation.sandbox

    @property
    def is_alive(self) -> bool:
        """Whether the next execution can be sent to this sandbox."""
        return self._channel is not None and self._conversation is not None and not self._conversation.gone

    # -- opening and closing

    async def start(self) -> None:
        """Opens the sandbox and starts the driver; the second time does nothing.

        Raises SandboxStartError, QuotaExceeded or ConfigurationError; whatever was created has been removed then.
        """
        async with self._starting:
            if self._channel is not None:
                return
            if self._ended:
                raise SandboxLost("this interpreter was shut down: make a new one")
            sandbox = await self._open()
            if self._ended:
                await run_shielded(sandbox.remove())
                raise SandboxLost("this interpreter was shut down while its sandbox was being opened")
            conversation = self._conversation = Conversation(sandbox)
            try:
                self._channel = await self._start_driver(conversation)
            except BaseException as error:
                self._closed("its driver did not start")
                self._conversation = None
                await run_shielded(sandbox.remove())
                if isinstance(error, RlmBatchError) or not isinstance(error, Exception):
                    raise
                raise SandboxStartError(f"the driver did not start in sandbox {sandbox.id}: {error}") from error

    async def _start_driver(self, conversation: Conversation) -> Channel:
        loop = asyncio.get_running_loop()
        ready = self._waiting[0] = loop.create_future()
        self._spoke_at = self._heard_at = loop.time()
        channel = await conversation.sandbox.connect(self._receive, self._closed)
        try:
            await channel.send(conversation.start())
            async with asyncio.timeout(START_TIMEOUT):
                await ready
        except SandboxLost:
            self._closed(conversation.hung_up())
        except TimeoutError:
            pass
        if not conversation.ready:
            raise conversation.not_started()
        settings = conversation.sandbox.settings
        if settings.heartbeat is not None:
            beats = self._keep_beating(conversation, channel, settings.heartbeat, settings.silence)
            self._beats = asyncio.create_task(beats)
        return channel

    async def shutdown(self) -> None:
        """Removes the sandbox, whatever it is doing; what runs ends with an error. The second time does nothing."""
        self._ended = True
        self._closed("it was shut down")
        self._threads.close()
        if self._beats is not None:
            self._beats.cancel()
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await run_shielded(conversation.sandbox.remove())

    async def __aenter__(self) -> Interpreter:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- executing

    async def execute(
        self,
        code: str,
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        context: str | None = None,
        output_fields: list[dict[str, str]] | None = None,
        on_output: Callable[[str, str], None] | None = None,
        encoded: Mapping[str, bytes] | None = None,
        queries: Queries | None = None,
    ) -> Result:
        """Runs the code in the sandbox, which is opened if it is not yet, and returns what it submitted.

        `variables` are JSON values that exist as top-level names when the code starts. `timeout` is in seconds; None
        takes the interpreter's. Without a `context` the code finds fresh globals in a process of its own; with one, it
        finds what earlier executions of that context have left. With `output_fields` (name, and optionally type: str,
        int, float, bool, list, dict) SUBMIT takes just those, also by position. `on_output` gets ("stdout" or
        "stderr", text) as the code writes it, on the event loop. `encoded` are more variables, as
        compact JSON: those over 256 KiB are handed over as files, and none of them stands in the result's meta.
        `queries` are what the code may ask of a model.

        Raises CodeError and its kinds, ExecutionTimeout, SubmitError, StateLost, SandboxStartError, SandboxLost,
        OutcomeUnknown, and ConfigurationError for variables that JSON cannot hold, or where a tool asks for the context
        that waits for it. Those of the code have `meta`.
        """
        if context is not None and (self, context) in _waiting_for_tool.get():
            raise ConfigurationError("a tool cannot run code in the interpreter that waits for it: give it another one")
        variables = {} if variables is None else variables
        tools = dict(self.tools)
        if queries is not None:
            tools = {name: tool for name, tool in tools.items() if name not in queries.tools}
        large = {name: value for name, value in (encoded or {}).items() if len(value) > FILE_OVER}
        places = {name: f"{OWN_FILE_PREFIX}-{uuid.uuid4().hex}.json" for name in large}
        small = {name: value for name, value in (encoded or {}).items() if name not in large}
        body = request(code, variables, tools, output_fields, small, places, queries=queries is not None)
        seconds = limit(timeout, self.timeout)
        await self.start()
        for name, place in places.items():
            await self.upload(place, large[name])
        one_by_one = contextlib.nullcontext() if context is None else self._contexts.setdefault(context, asyncio.Lock())
        async with one_by_one:
            conversation, channel = self._conversation, self._channel
            if conversation is None or channel is None:
                raise SandboxLost("the sandbox was shut down before the code was sent: run it in a new one")
            if not conversation.pending:
                await conversation.sandbox.refresh_volume()
            if queries is None:
                pending, frame = conversation.execute(body, variables, seconds, context, tools, on_output)
                return await self._await(conversation, channel, pending, frame)
            if queries.is_top_level:
                queries.session.set_deadline(seconds)
            tools.update(queries.tools)
            pending, frame = conversation.execute(body, variables, seconds, context, tools, on_output)
            try:
                result = await self._await(conversation, channel, pending, frame)
            except RlmBatchError as error:
                if error.meta is not None:
                    error.meta = replace(error.meta, queries=queries.session.summarize())
                raise
            result.meta = replace(result.meta, queries=queries.session.summarize())
            return result

    async def _await(self, conversation: Conversation, channel: Channel, pending: Pending, frame: bytes) -> Result:
        ended = self._waiting[pending.id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(channel, frame)
            async with asyncio.timeout(None if pending.timeout is None else pending.timeout + conversation.grace()):
                await ended
        except TimeoutError:
            self._closed(conversation.silent(pending))
        except asyncio.CancelledError:
            if not conversation.gone and pending.end is None:
                with contextlib.suppress(SandboxLost):
                    await run_shielded(self._send(channel, conversation.cancel(pending)))
            raise
        finally:
            self._waiting.pop(pending.id, None)
            for call in self._calls.pop(pending.id, ()):
                call.cancel()
        if pending.end is None:
            raise conversation.lost(pending)
        return conversation.result(pending)

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a file in the sandbox; see `Sandbox.upload`. Opens the sandbox if it is not yet."""
        await self.start()
        if self._conversation is None:
            raise SandboxLost("the sandbox was shut down before the file was sent: run the code in a new one")
        await self._conversation.sandbox.upload(path, data)

    async def forget_context(self, context: str) -> None:
        """Ends a context; its name begins anew with the next execution."""
        conversation, channel = self._conversation, self._channel
        if conversation is not None and channel is not None and not conversation.gone:
            await self._send(channel, conversation.frame({"op": "forget", "id": 0, "context": context}))

    # -- the wire

    async def _send(self, channel: Channel, frame: bytes) -> None:
        self._spoke_at = asyncio.get_running_loop().time()
        await channel.send(frame)

    def _receive(self, data: bytes) -> None:
        conversation = self._conversation
        if conversation is None:
            return
        self._heard_at = asyncio.get_running_loop().time()
        try:
            heard = conversation.hear(data)
        except BadFrameError as error:
            self._closed(f"it sent what is no frame ({error})")
            return
        if conversation.ready and 0 in self._waiting:
            _wake(self._waiting.pop(0))
        for pending, frame in heard:
            if pending.end is not None:
                waiting = self._waiting.get(pending.id)
                if waiting is not None:
                    _wake(waiting)
            else:
                task = asyncio.get_running_loop().create_task(
                    self._answer(conversation, pending, frame), context=pending.asked_in.copy()
                )
                calls = self._calls.setdefault(pending.id, set())
                calls.add(task)
                task.add_done_callback(calls.discard)

    async def _answer(self, conversation: Conversation, pending: Pending, frame: Frame) -> None:
        """Calls a tool for the code, and sends what it returned or raised."""
        header, body = frame
        _waiting_for_tool.set((*_waiting_for_tool.get(), (self, pending.context)))  # this task's own, and its thread's
        try:
            tool = pending.tools[header["name"]]
            args, kwargs = arguments(body)
            if inspect.iscoroutinefunction(tool):
                value = await tool(*args, **kwargs)
            else:
                value = await self._threads.run_in_thread(functools.partial(tool, *args, **kwargs))
                if inspect.isawaitable(value):
                    value = await value
            reply = answer(header["name"], value)
        except asyncio.CancelledError as error:
            if pending.end is not None or pending.id not in conversation.pending:
                raise  # the call's own execution has ended
            reply = refusal(error)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the code's to handle
            reply = refusal(error)
        if self._channel is not None and not conversation.gone:
            with contextlib.suppress(SandboxLost):  # the execution that asked learns of it by its own end
                await self._send(self._channel, conversation.reply(header, reply))

    def _closed(self, reason: str) -> None:
        """The wire has ended: so has everything that waits on it."""
        conversation = self._conversation
        if conversation is not None and not conversation.gone:
            conversation.gone = reason
            for waiting in self._waiting.values():
                _wake(waiting)

    async def _keep_beating(
        self, conversation: Conversation, channel: Channel, interval: float, silence: float
    ) -> None:
        loop = asyncio.get_running_loop()
        while not conversation.gone:
            now = loop.time()
            if now >= self._heard_at + silence:
                self._closed(f"it has said nothing for {silence:.0f} s")
                return
            if now >= self._spoke_at + interval:
                try:
                    await self._send(channel, conversation.frame({"op": "beat", "id": 0}))
                except SandboxLost:
                    return
            await asyncio.sleep(min(self._spoke_at + interval, self._heard_at + silence) - loop.time() + 0.01)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
