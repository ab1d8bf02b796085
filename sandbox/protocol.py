"""What is said between the host and one driver, without the reading and writing: frames in, frames out, outcomes.

`interpreter` says it on an event loop, `pipe_transport` on a pair of descriptors.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import keyword
import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

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
    VolumeError,
)
from .meta import Meta
from .result import Result
from .wire.frames import FrameReader, encode_frame
from .wire.names import COMMIT_TIMEOUT_SECONDS, MAX_REPORTED_FILES, QUERY_ERROR_NAMES, QUERY_NAMES, VOLUME_NAMES
from .wire.strict_json import NotJsonError, encode_fields

if TYPE_CHECKING:
    from .provider_api import Sandbox

START_TIMEOUT = 60.0  # seconds for the driver to answer in a sandbox that its provider calls started
ANSWER_GRACE = 30.0  # seconds beyond a timeout after which a driver that has not reported it is taken for lost
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
SIGXCPU = 24
FILE_OVER = 256 * 1024  # bytes of JSON above which a value goes into the sandbox as a file and not in a frame

Tools = Mapping[str, Callable[..., Any]]
Frame = tuple[dict[str, Any], bytes]


class Pending:
    """An execution that has been sent, and what has come of it so far. `end` is its last frame, once it is there."""

    __slots__ = (
        "asked_in", "context", "end", "failed", "files", "id", "meta", "on_output", "output", "timeout", "tools",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        meta: Meta,
        timeout: float | None,
        context: str | None,
        tools: Tools,
        on_output: Callable[[str, str], None] | None,
    ) -> None:
        self.id = number
        self.meta = meta
        self.timeout = timeout
        self.context = context
        self.tools = tools
        self.on_output = on_output
        self.output: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.files: tuple[str, ...] = ()
        self.end: Frame | None = None
        self.failed: Exception | None = None  # what a listener raised
        self.asked_in = contextvars.copy_context()  # the context variables that its tools see

    def write(self, stream: str, text: str, dropped: int) -> None:
        """Takes what the code has written, and tells whoever listens; a listener that fails is not told again."""
        if dropped:
            text = f"\n[... {dropped:,} characters dropped ...]\n{text}"
        self.output[stream].append(text)
        if self.on_output is not None:
            try:
                self.on_output(stream, text)
            except Exception as error:  # noqa: BLE001 - it is raised where the execution was asked for
                self.on_output, self.failed = None, error

    def told(self) -> Meta:
        """The meta, with the output that has come."""
        stdout, stderr = "".join(self.output["stdout"]), "".join(self.output["stderr"])
        return replace(self.meta, stdout=stdout, stderr=stderr, files=self.files)


class Conversation:
    """One driver's side of things: numbers for what is sent, executions for what comes back."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.pending: dict[int, Pending] = {}
        self.ready = False
        self.gone = ""  # why nothing more can be said
        self._frames = FrameReader()
        self._ids = itertools.count(1)
        self._numbers = itertools.count(0)
        self._heard = 0

    # -- what is said

    def frame(self, header: dict[str, Any], body: bytes | None = None) -> bytes:
        """A frame's bytes, with the number that makes a repetition known. They must be sent in this order."""
        header["n"] = next(self._numbers)
        return encode_frame(header, body)

    def start(self) -> bytes:
        """The first frame: the settings of the sandbox's driver."""
        settings = self.sandbox.settings
        body = {item.name: getattr(settings, item.name) for item in fields(settings)}
        return self.frame({"op": "start", "id": 0}, encode_fields(body))

    def execute(
        self,
        body: bytes,
        variables: dict[str, Any],
        timeout: float | None,
        context: str | None,
        tools: Tools,
        on_output: Callable[[str, str], None] | None = None,
    ) -> tuple[Pending, bytes]:
        """An execution and its frame. Raises SandboxLost where nothing more can be said."""
        if self.gone:
            raise SandboxLost(f"the sandbox had gone before the code was sent ({self.gone}): run it in a new one")
        sandbox = self.sandbox
        meta = Meta(
            variables=variables,
            provider=sandbox.provider,
            sandbox_id=sandbox.id,
            isolation=sandbox.isolation,
            layers=sandbox.layers,
        )
        number = next(self._ids)
        pending = self.pending[number] = Pending(number, meta, timeout, context, tools, on_output)
        return pending, self.frame({"op": "execute", "id": number, "timeout": timeout, "context": context}, body)

    def cancel(self, pending: Pending) -> bytes:
        """The frame that ends an execution."""
        return self.frame({"op": "cancel", "id": pending.id})

    def reply(self, call: dict[str, Any], body: bytes) -> bytes:
        """The frame that answers a call."""
        return self.frame({"op": "reply", "id": call["id"], "call": call["call"]}, body)

    # -- what is heard

    def hear(self, data: bytes) -> list[tuple[Pending, Frame]]:
        """Takes what came from the driver; returns the calls and ends in it. Raises driver.BadFrame."""
        found: list[tuple[Pending, Frame]] = []
        for header, body in self._frames.feed(data):
            if header["n"] <= self._heard:
                continue
            self._heard = header["n"]
            op = header["op"]
            if op == "ready":
                self.ready = True
                continue
            pending = self.pending.get(header["id"])
            if pending is None:
                continue  # a beat, or of an execution that nobody waits for any more
            if op == "output":
                pending.write(header["stream"], json.loads(body or b'""'), header["dropped"])
                continue
            if op == "files":
                pending.files = _names(body or b"[]")
                continue
            if op == "end":
                pending.end = (header, body or b"null")
                del self.pending[pending.id]
            found.append((pending, (header, body or b"null")))
        return found

    def result(self, pending: Pending) -> Result:
        """The result of an execution that has ended. Raises its error, with `meta`."""
        assert pending.end is not None
        if pending.failed is not None:
            raise pending.failed
        header, body = pending.end
        meta = replace(pending.told(), seconds=header.get("seconds", 0.0))
        try:
            outcome = json.loads(body, parse_constant=_no_constant)
            if b"\\u" in body:  # the driver escapes no letters; whoever wrote this may have escaped half a one
                json.dumps(outcome, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError):
            header, outcome = {"status": "channel"}, {"message": "an outcome that is no JSON"}
        given: dict[str, Any] = outcome if isinstance(outcome, dict) else {}  # type: ignore[reportUnknownVariableType]
        if header["status"] == "submitted":
            return Result(given, replace(meta, submitted=True))
        if header["status"] == "finished":
            return Result({}, meta)
        error = _error(header, given, meta, pending.timeout)
        error.meta = meta
        raise error

    def lost(self, pending: Pending) -> RlmBatchError:
        """The error of an execution that was sent and that this conversation will not answer."""
        self.pending.pop(pending.id, None)
        error = OutcomeUnknown(
            f"sandbox {self.sandbox.id} went away before the code had answered ({self.gone}); what the code did is "
            "unknown. Pass idempotent=True if it may run twice"
        )
        error.meta = pending.told()
        return error

    def not_started(self) -> RlmBatchError:
        """The error of a driver that has ended, or not answered in time, before it was ready."""
        reason = self.gone or f"it did not answer within {START_TIMEOUT:.0f} s"
        return SandboxStartError(f"the driver did not start in sandbox {self.sandbox.id}: {reason}")

    def hung_up(self) -> str:
        """Why a driver whose wire has ended can be asked nothing more."""
        words = self.sandbox.last_words()
        return f"its process has ended: {words}" if words else "its process has ended"

    def grace(self) -> float:
        """Seconds beyond a timeout after which a driver that has not reported it is taken for lost."""
        return ANSWER_GRACE + (COMMIT_TIMEOUT_SECONDS if self.sandbox.settings.commit else 0.0)

    def silent(self, pending: Pending) -> str:
        """Why a conversation is given up whose execution has outlived its timeout by far."""
        return f"it has not answered {self.grace():.0f} s after the timeout of {pending.timeout:g} s"


# ----------------------------------------------------------------------------------------------- requests and replies


def request(
    code: str,
    variables: dict[str, Any],
    tools: Tools,
    output_fields: list[dict[str, str]] | None = None,
    encoded: Mapping[str, bytes] | None = None,
    files: Mapping[str, str] | None = None,
    *,
    queries: bool = False,
) -> bytes:
    """An execution's body; `encoded` are variables that are JSON already, `files` the paths of such in the sandbox.

    `queries` says whether the code may ask a model. Raises ConfigurationError for what cannot be sent.
    """
    if type(code) is not str:
        raise ConfigurationError(f"code is a {type(code).__name__}: it is the text of a Python program")
    for name in (*variables, *(encoded or ()), *(files or ())):
        if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(f"the variable {name!r} is no name that Python code could use: rename it")
        taken = name == "SUBMIT" or name in VOLUME_NAMES or name in tools
        if taken or (queries and (name in QUERY_NAMES or name in QUERY_ERROR_NAMES)):
            raise ConfigurationError(
                f"the variable {name!r} would hide a function or a constant of that name: rename it"
            )
    try:
        # As Python itself does to a name in the code.
        values = encode_fields({unicodedata.normalize("NFKC", name): value for name, value in variables.items()})
        rest = encode_fields(
            {
                "code": code,
                "names": list(tools),
                "output_fields": output_fields,
                "files": dict(files or {}),
                "queries": queries,
            }
        )
    except NotJsonError as error:
        raise ConfigurationError(f"the variables and the code must be JSON and UTF-8: {error}") from None
    more = b",".join(encode_fields({name: None})[1:-5] + value for name, value in (encoded or {}).items())
    values = b"".join((values[:-1], b"," if variables and more else b"", more, b"}"))
    return b"".join((rest[:-1], b',"variables":', values, b"}"))


def _names(body: bytes) -> tuple[str, ...]:
    """Names of files; the code may have written them, and anything else is none."""
    try:
        found: Any = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, list):
        return ()
    names: list[Any] = found  # type: ignore[reportUnknownVariableType]
    return tuple(name for name in names[:MAX_REPORTED_FILES] if isinstance(name, str))


def limit(timeout: float | None, default: float | None) -> float | None:
    """The timeout that is in force, in seconds. Raises ConfigurationError."""
    found = default if timeout is None else timeout
    if found == math.inf:
        return None
    if found is not None and not found > 0:
        raise ConfigurationError(f"timeout is {found!r}: it is a number of seconds above zero, or None for no limit")
    return found


def arguments(body: bytes) -> tuple[list[Any], dict[str, Any]]:
    """What a tool was called with. The code may have written it: anything wrong is a ValueError."""
    call = json.loads(body, parse_constant=_no_constant)
    args: list[Any] = call["args"]
    kwargs: dict[str, Any] = call["kwargs"]
    if type(args) is not list or type(kwargs) is not dict:
        raise ValueError("a call without arguments")
    return args, kwargs


def answer(name: str, value: Any) -> bytes:
    """A reply's body for what a tool returned."""
    try:
        return encode_fields({"value": value})
    except NotJsonError as error:
        return encode_fields({"error": {"type": "TypeError", "message": f"{name} returned no JSON: {error}"}})


def refusal(error: BaseException) -> bytes:
    """A reply's body for what a tool raised."""
    try:
        message = str(error).encode("utf-8", "replace").decode("utf-8")
    except Exception:  # noqa: BLE001 - an exception may do anything when it is asked for its text
        message = "(its message could not be read)"
    return encode_fields({"error": {"type": type(error).__name__, "message": message}})


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
            f"the code was still running{where} after its timeout of {timeout:g} s; give it more with timeout=, or "
            f"less to do.{lost}" + (f"\n{traceback}" if traceback else ""),
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
    if status == "unconfined":
        return CodeCrashed(f"the code was not run: {outcome.get('message')}. Ask rlm-batch doctor", **details)
    if status == "setup":
        return SandboxStartError(f"the code was not run: {message}")
    if status == "commit":
        return VolumeError(
            f"the code ended well, and what it saved to the volume could not be committed: {message}. Its files may be "
            "missing for others: run it again"
        )
    if status == "cancelled":
        return CodeCrashed(f"the execution was cancelled.{lost}", **details)
    if kind == "submit":
        return SubmitError(f"{message}{where}")
    if kind == "volume":
        return VolumeError(f"{message}{where}")
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
    elif signal == SIGXCPU:
        text = "the code used up its CPU seconds: give the sandbox more, or the code less to do"
    elif signal is not None:
        name = SIGNALS.get(signal, f"signal {signal}")
        text = f"the code's process was killed by {name}: look for native code, or for what sends that signal"
    else:
        text = f"the code's process exited with status {code} before the code had ended: look for os._exit"
    return CodeCrashed(
        f"{text}.{lost}" if lost else text, exit_code=code, signal=signal, out_of_memory=memory, stdout=meta.stdout
    )
