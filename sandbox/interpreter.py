"""The interpreter: the host's handle on the Python inside one open sandbox.

The core is async. Its synchronous face, for scripts, is in `blocking`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import keyword
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread

from .driver import BadFrame, Frames, NotJson, encode, strict_json
from .errors import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ConfigurationError,
    ExecutionTimeout,
    OutcomeUnknown,
    RlmBatchError,
    SandboxLost,
    SandboxStartError,
    StateLost,
    SubmitError,
)
from .result import Meta, Result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from .contract import Channel, Sandbox

START_TIMEOUT = 60.0  # seconds for the driver to answer in a sandbox that its provider calls started
ANSWER_GRACE = 30.0  # seconds beyond a timeout after which a driver that has not reported it is taken for lost
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM", 24: "SIGXCPU"}


class Pending:
    """An execution that has been sent, and what has come of it so far."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]], on_output: Callable[[str, str], None] | None) -> None:
        self.end: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self.output: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.tools = tools
        self.on_output = on_output
        self.calls: set[asyncio.Task[None]] = set()


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
        self._sandbox: Sandbox | None = None
        self._channel: Channel | None = None
        self._frames = Frames()
        self._ids = itertools.count(1)
        self._numbers = itertools.count(0)
        self._heard = 0
        self._pending: dict[int, Pending] = {}
        self._contexts: dict[str, asyncio.Lock] = {}
        self._starting: asyncio.Lock = asyncio.Lock()
        self._ready: asyncio.Future[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._gone = ""
        self._spoke = self._heard_at = 0.0
        self._threads = CapacityLimiter(math.inf)

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox, once it is open."""
        return self._sandbox

    @property
    def alive(self) -> bool:
        """Whether the next execution can be sent to this sandbox."""
        return self._channel is not None and not self._gone

    # -- opening and closing

    async def start(self) -> None:
        """Opens the sandbox and starts the driver; the second time does nothing.

        Raises SandboxStartError, QuotaExceeded or ConfigurationError; whatever was created has been removed then.
        """
        async with self._starting:
            if self._channel is not None:
                return
            if self._gone:
                raise SandboxLost(f"this interpreter has ended ({self._gone}): make a new one")
            sandbox = self._sandbox = await self._open()
            try:
                await self._start_driver(sandbox)
            except BaseException as error:
                self._gone = self._gone or "its driver did not start"
                await _shielded(sandbox.remove())
                if isinstance(error, (RlmBatchError, asyncio.CancelledError)):
                    raise
                raise SandboxStartError(f"the driver did not start in sandbox {sandbox.id}: {error}") from error

    async def _start_driver(self, sandbox: Sandbox) -> None:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._spoke = self._heard_at = loop.time()
        channel = await sandbox.connect(self._receive, self._closed)
        settings = sandbox.settings
        body = {
            "cwd": settings.cwd,
            "environment": settings.environment,
            "path": settings.path,
            "heartbeat": settings.heartbeat,
            "silence": settings.silence,
            "lifetime": settings.lifetime,
            "confinement": settings.confinement,
            "output_cap": settings.output_cap,
        }
        await self._send_on(channel, {"op": "start", "id": 0}, strict_json(body))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._ready
        except TimeoutError:
            raise SandboxStartError(
                f"the driver in sandbox {sandbox.id} did not answer within {START_TIMEOUT:.0f} s; the sandbox was removed"
            ) from None
        self._channel = channel
        if settings.heartbeat is not None:
            self._beats = asyncio.create_task(self._keep_beating(channel, settings.heartbeat, settings.silence))

    async def shutdown(self) -> None:
        """Removes the sandbox, whatever it is doing. Executions under way end with an error; the second time does nothing."""
        self._closed("it was shut down")
        if self._beats is not None:
            self._beats.cancel()
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await _shielded(sandbox.remove())

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
    ) -> Result:
        """Runs the code in the sandbox, which is opened if it is not yet, and returns what it submitted.

        `variables` are JSON values that exist as top-level names when the code starts. `timeout` is in seconds; None
        takes the interpreter's. Without a `context` the code finds fresh globals in a process of its own; with one, it
        finds what earlier executions of that context have left. With `output_fields` (name, and optionally type: str,
        int, float, bool, list, dict) SUBMIT takes just those, also by position. `on_output` gets ("stdout" or
        "stderr", text) as the code writes it, on the event loop.

        Raises CodeError and its kinds, ExecutionTimeout, SubmitError, StateLost, SandboxStartError, SandboxLost,
        OutcomeUnknown, and ConfigurationError for variables that JSON cannot hold. Each has `meta`.
        """
        variables = {} if variables is None else variables
        body = self._body(code, variables, output_fields)
        await self.start()
        if context is None:
            return await self._run(body, variables, self._limit(timeout), None, on_output)
        async with self._contexts.setdefault(context, asyncio.Lock()):
            return await self._run(body, variables, self._limit(timeout), context, on_output)

    async def forget(self, context: str) -> None:
        """Ends a context; its name begins anew with the next execution."""
        if self._channel is not None and not self._gone:
            await self._send({"op": "forget", "id": 0, "context": context})

    def _limit(self, timeout: float | None) -> float | None:
        limit = self.timeout if timeout is None else timeout
        if limit is not None and not limit > 0:
            raise ConfigurationError(f"timeout is {limit!r}: it is a number of seconds above zero, or None for no limit")
        return limit

    def _body(self, code: str, variables: dict[str, Any], output_fields: list[dict[str, str]] | None) -> bytes:
        if type(code) is not str:
            raise ConfigurationError(f"code is a {type(code).__name__}: it is the text of a Python program")
        taken = {"SUBMIT", *self.tools}
        for name in variables:
            if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
                raise ConfigurationError(f"the variable {name!r} is no name that Python code could use: rename it")
            if name in taken:
                raise ConfigurationError(f"the variable {name!r} would hide a function of that name: rename it")
        try:
            values = strict_json(variables)
            rest = strict_json({"code": code, "names": list(self.tools), "output_fields": output_fields})
        except NotJson as error:
            raise ConfigurationError(f"the variables and the code must be JSON and UTF-8: {error}") from None
        return b"".join((rest[:-1], b',"variables":', values, b"}"))

    async def _run(
        self,
        body: bytes,
        variables: dict[str, Any],
        timeout: float | None,
        context: str | None,
        on_output: Callable[[str, str], None] | None,
    ) -> Result:
        sandbox = self._sandbox
        if self._gone or sandbox is None:
            raise SandboxLost(f"the sandbox had gone before the code was sent ({self._gone}): run it in a new one")
        number = next(self._ids)
        pending = self._pending[number] = Pending(dict(self.tools), on_output)
        meta = Meta(
            variables=variables,
            provider=sandbox.provider,
            sandbox_id=sandbox.id,
            isolation=sandbox.isolation,
            layers=sandbox.layers,
        )
        try:
            await self._send({"op": "execute", "id": number, "timeout": timeout, "context": context}, body)
            async with asyncio.timeout(None if timeout is None else timeout + ANSWER_GRACE):
                header, outcome = await pending.end
        except TimeoutError:
            self._closed(f"it did not answer {ANSWER_GRACE:.0f} s after the timeout of an execution")
            error = OutcomeUnknown(
                f"sandbox {sandbox.id} has not answered {ANSWER_GRACE:.0f} s after the timeout of {timeout} s; what the "
                "code did is unknown. Pass idempotent=True if it may run twice"
            )
            raise self._with_meta(error, pending, meta) from None
        except asyncio.CancelledError:
            if not self._gone:
                await _shielded(self._cancel(number))
            raise
        except RlmBatchError as error:
            raise self._with_meta(error, pending, meta)
        finally:
            self._pending.pop(number, None)
            for call in pending.calls:
                call.cancel()
        meta = self._meta(pending, replace(meta, seconds=header.get("seconds", 0.0)))
        try:
            fields = json.loads(outcome, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            header, fields = {"status": "channel"}, {"message": "an outcome that is no JSON"}
        if header["status"] == "submitted":
            return Result(fields, replace(meta, submitted=True))
        if header["status"] == "finished":
            return Result({}, meta)
        error = _error(header, fields if isinstance(fields, dict) else {}, meta, timeout)
        error.meta = meta
        raise error

    async def _cancel(self, number: int) -> None:
        try:
            await self._send({"op": "cancel", "id": number})
        except SandboxLost:
            pass  # what was to be cancelled has gone with it

    @staticmethod
    def _meta(pending: Pending, meta: Meta) -> Meta:
        return replace(meta, stdout="".join(pending.output["stdout"]), stderr="".join(pending.output["stderr"]))

    def _with_meta(self, error: RlmBatchError, pending: Pending, meta: Meta) -> RlmBatchError:
        error.meta = self._meta(pending, meta)
        return error

    # -- the wire

    async def _send(self, header: dict[str, Any], body: bytes | None = None) -> None:
        if self._channel is None:
            raise SandboxLost("the sandbox is not open")
        await self._send_on(self._channel, header, body)

    async def _send_on(self, channel: Channel, header: dict[str, Any], body: bytes | None) -> None:
        header["n"] = next(self._numbers)
        self._spoke = asyncio.get_running_loop().time()
        await channel.send(encode(header, body))

    def _receive(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        try:
            for header, body in self._frames.feed(data):
                if header["n"] > self._heard:
                    self._heard = header["n"]
                    self._on_frame(header, body or b"null")
        except BadFrame as error:
            self._closed(f"it sent what is no frame ({error})")

    def _on_frame(self, header: dict[str, Any], body: bytes) -> None:
        op = header["op"]
        if op == "ready":
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
            return
        pending = self._pending.get(header["id"])
        if pending is None:
            return  # a beat, or of an execution that nobody waits for any more
        if op == "end":
            if not pending.end.done():
                pending.end.set_result((header, body))
        elif op == "output":
            text = header["text"]
            if header.get("dropped"):
                text = f"\n[... {header['dropped']:,} characters dropped ...]\n{text}"
            pending.output[header["stream"]].append(text)
            if pending.on_output is not None:
                pending.on_output(header["stream"], text)
        elif op == "call":
            call = asyncio.get_running_loop().create_task(self._answer(pending, header, body))
            pending.calls.add(call)
            call.add_done_callback(pending.calls.discard)

    async def _answer(self, pending: Pending, header: dict[str, Any], body: bytes) -> None:
        """Calls a tool for the code, and sends what it returned or raised."""
        try:
            tool = pending.tools[header["name"]]
            request = json.loads(body, parse_constant=_no_constant)
            args, kwargs = request["args"], request["kwargs"]
            if inspect.iscoroutinefunction(tool):
                value = await tool(*args, **kwargs)
            else:
                value = await to_thread.run_sync(lambda: tool(*args, **kwargs), limiter=self._threads)
            reply = strict_json({"value": value})
        except NotJson as error:
            reply = strict_json({"error": {"type": "TypeError", "message": f"{header['name']} returned no JSON: {error}"}})
        except Exception as error:
            message = str(error).encode("utf-8", "replace").decode("utf-8")
            reply = strict_json({"error": {"type": type(error).__name__, "message": message}})
        try:
            await self._send({"op": "reply", "id": header["id"], "call": header["call"]}, reply)
        except SandboxLost:
            pass  # the execution that asked learns of it by its own end

    def _closed(self, reason: str) -> None:
        """The wire has ended: so has everything that waits on it."""
        if self._gone:
            return
        self._gone = reason
        where = f"sandbox {self._sandbox.id}" if self._sandbox is not None else "the sandbox"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxStartError(f"the driver did not start in {where}: {reason}"))
        for pending in self._pending.values():
            if not pending.end.done():
                pending.end.set_exception(
                    OutcomeUnknown(
                        f"{where} went away before the code had answered ({reason}); what the code did is unknown. "
                        "Pass idempotent=True if it may run twice"
                    )
                )

    async def _keep_beating(self, channel: Channel, interval: float, silence: float) -> None:
        loop = asyncio.get_running_loop()
        while not self._gone:
            now = loop.time()
            if now >= self._heard_at + silence:
                self._closed(f"it has said nothing for {silence:.0f} s")
                return
            if now >= self._spoke + interval:
                try:
                    await self._send_on(channel, {"op": "beat", "id": 0}, None)
                except SandboxLost:
                    return
            await asyncio.sleep(min(self._spoke + interval, self._heard_at + silence) - loop.time() + 0.01)


async def _shielded(work: Awaitable[None]) -> None:
    """Lets the work end although the caller is cancelled meanwhile, and only then passes the cancellation on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _error(header: dict[str, Any], outcome: dict[str, Any], meta: Meta, timeout: float | None) -> RlmBatchError:
    """The error that an execution's end stands for. The outcome is the code's own word and is trusted with nothing."""
    status, kind = header["status"], outcome.get("kind")
    traceback = str(outcome.get("traceback", ""))
    name, message = str(outcome.get("type", "")), str(outcome.get("message", ""))
    line = outcome.get("line") if isinstance(outcome.get("line"), int) else None
    where = f" (line {line})" if line is not None else ""
    lost = " The state that earlier executions had left is lost." if header.get("state_lost") else ""
    details: dict[str, Any] = {
        "type": name, "message": message, "traceback": traceback, "stdout": meta.stdout, "line": line,
    }  # fmt: skip
    if status == "timeout":
        return ExecutionTimeout(
            f"the code was still running{where} after its timeout of {timeout:g} s; give it more with timeout=, or less "
            f"to do.{lost}" + (f"\n{traceback}" if traceback else ""),
            timeout=timeout or 0.0,
            traceback=traceback,
            stdout=meta.stdout,
        )
    if status == "crashed":
        return _crash(header, lost, meta)
    if status == "channel":
        return CodeCrashed(
            f"the code wrote to a descriptor that is the sandbox's own ({message}); write to files and to descriptors "
            f"that the code has opened.{lost}",
            **details,
        )
    if status == "lost":
        return StateLost(f"the state of the earlier executions is lost: {message}. Start again from the first step")
    if status == "setup":
        return SandboxStartError(f"the code was not run: {message}")
    if status == "cancelled":
        return CodeCrashed(f"the execution was cancelled.{lost}", **details)
    if kind == "submit":
        return SubmitError(f"{message}{where}")
    if kind == "memory":
        return CodeCrashed(
            f"the code ran out of memory{where}: work on less at a time, or give the sandbox more\n{traceback}",
            out_of_memory=True,
            **details,
        )
    if kind == "exit":
        code = outcome.get("exit_code")
        return CodeCrashed(
            f"the code called exit({message}){where}; to hand something back it calls SUBMIT, which ends it",
            exit_code=code if isinstance(code, int) else 1,
            **details,
        )
    if kind == "syntax":
        return CodeSyntaxError(f"the code is not valid Python{where}: {message}\n{traceback}", **details)
    return CodeError(f"the code raised {name}{where}: {message}\n{traceback}", **details)


def _crash(header: dict[str, Any], lost: str, meta: Meta) -> CodeCrashed:
    code, signal, memory = header.get("exit_code"), header.get("signal"), bool(header.get("out_of_memory"))
    if memory:
        text = "the kernel killed the code for want of memory: work on less at a time, or give the sandbox more"
    elif signal == 24:
        text = "the code used up its CPU seconds: give the sandbox more, or the code less to do"
    elif signal is not None:
        name = SIGNALS.get(signal, f"signal {signal}")
        text = f"the code's process was killed by {name}: look for native code, or for what sends that signal"
    else:
        text = f"the code's process exited with status {code} before the code had ended: look for os._exit"
    return CodeCrashed(text + lost, exit_code=code, signal=signal, out_of_memory=memory, stdout=meta.stdout)
