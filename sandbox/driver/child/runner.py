"""Runs code in a child: its globals, its streams, and what becomes of it, as the host is told."""

from __future__ import annotations

import gc
import os
import resource
import sys
from atexit import _run_exitfuncs  # type: ignore[reportPrivateUsage]
from sys import getrecursionlimit, setrecursionlimit

from ...wire.frames import take_file
from ...wire.names import DRIVER_FILE_PREFIX
from ...wire.nonfinite import restore_numbers
from ...wire.strict_json import dumps, loads
from ..processes import signal
from .channel import Channel, InterruptShield
from .code_settings import DRIVER_DEPTH, CodeSettings
from .displays import PYPLOT, Displays, replace_show
from .environment import open_streams
from .evaluation.coroutines import IS_COROUTINE, CoroutineRunner, await_codes, silence_own_errors
from .evaluation.last_expression import compile_code
from .file_changes import report_missing_files
from .forking.fork_safety import (
    ThreadsLeftError,
    ThreadStarts,
    check_threads,
    disarm_finalizers,
    import_common_modules,
    load_generators,
    seed_generators,
)
from .imports import MODULES, ImportWatcher, repair_imports
from .limits import find_limit
from .main_module import CODE_NAME, MainModule
from .open_files import OpenFiles
from .queries import make_query_names
from .report import make_report
from .submit import SubmitError, Submitted, encode_submission
from .volume import Volume, VolumeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any, NoReturn

    from ..confinement import Confinement

PREPARE_NAME = "<prepare>"
MAX_TRACEBACK_CHARACTERS = 20_000
REHEARSAL = b'{"code":"x = 0","names":[],"output_fields":null,"queries":false,"variables":{}}'
# Of the SystemError that Python 3.11 raised, in the place of a MemoryError, in a function that had filled its memory.
NO_EXCEPTION = "error return without exception set"
FILLED_SHARE = 0.5  # of the address space, which holds Python's libraries too, and what was never touched
RESERVE_BYTES = 4 * 1024 * 1024  # of address space, not touched, let go when there is an error to be described


class CodeRunner:
    """Runs the executions of one child: one, or those of a context, whose globals stay.

    It is made in the process that children are forked from, once for all: to make it takes a child half a millisecond,
    nearly all of it for the pages of memory that it writes to.
    That process has the code's main module and streams in `sys` from then on.
    """

    def __init__(self) -> None:
        self._shield = InterruptShield()
        self._channel = Channel(self._shield)
        self._coroutines = CoroutineRunner(self._shield)
        self._main = MainModule()
        self._module = self._main.module
        self._settings = CodeSettings()
        self._folder = "/"  # that the code runs in
        self._is_stateless = self._is_compiled = False
        self._executions = 0
        self._refuses_exit = False  # with status 0, of the execution under way
        self._prepared: dict[str, Any] = {}
        self._files = OpenFiles()
        self._parent = 0  # of a fork of a process that has prepared: the supervisor's id
        self._file_name = CODE_NAME
        self._reserve: bytes | None = None
        self._provided_names: dict[bool, dict[str, Any]] = {}
        self._given_names: dict[str, Any] = {}  # with the values that the code last found
        self._displays: Displays | None = None  # of the execution under way
        self._volume = Volume(None, False, self._shield)  # until there are settings
        for can_query in (False, True):
            self._provide_names(can_query)
        self._become_main()

    def _become_main(self) -> None:
        """Puts the code's main module and streams where code looks for them: the driver has no use for its own."""
        watcher = ImportWatcher()
        self._main.install(watcher)
        self._streams = open_streams()
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        watcher.actions["asyncio.base_events"] = silence_own_errors
        watcher.actions[PYPLOT] = lambda pyplot: replace_show(pyplot, self._show_figures)
        sys.meta_path.insert(0, watcher)
        import builtins

        for name in ("exit", "quit"):  # the names that `site` would have made; model-written code uses them
            if not hasattr(builtins, name):
                setattr(builtins, name, sys.exit)

    def enter_process(self) -> None:
        """Makes the calling process one that runs code: interrupts end that, and what it sends is this process's."""
        self._channel.process_id = os.getpid()
        self._shield.handle_interrupts()

    def rehearse(self) -> None:
        """Runs what does nothing, as an execution, of which the end alone is left: a frame on the channel.

        What a process copies of its parent's memory for its first execution is its own then, before somebody waits.
        """
        names = dict(self._module.__dict__)
        self.run(REHEARSAL)
        gc.disable()
        self._module.__dict__.clear()
        self._module.__dict__.update(names)
        self._main.reset()
        self._displays, self._executions, self._given_names = None, 0, {}

    def wait_for_settings(self) -> dict[str, Any]:
        """The settings of the sandbox, which come before the first execution to a process that was forked ahead."""
        settings: dict[str, Any] = loads(self._channel.wait_for_settings().decode("utf-8"))
        return settings

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Makes this one of the sandbox that has these settings; before the first execution."""
        is_shared = settings["confinement"].get("umask") is not None
        if settings["volume"] is not None:
            self._volume = Volume(settings["volume"], is_shared, self._shield)
            self._provided_names.clear()
        # Last: what an execution leaves there does not stand for a module of the library.
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.append(settings["cwd"])
        self._folder = settings["cwd"]
        # Here and not in the supervisor, which would run such a module in the place of one of the library.
        sys.path[:0] = settings["python_path"]
        if settings["confinement"].get("ignores_changes"):
            report_missing_files()

    def serve(self, confinement: Confinement) -> NoReturn:
        """Waits for an execution. The process ends with a stateless one; a context's others follow on its globals."""
        channel = self._channel
        header, body = channel.wait(channel.NEXT, channel.expect_execution())
        if self._parent:
            confinement.end_with_parent(self._parent)  # which it is by now
        if "cpu_seconds" in header:
            confinement.limit_cpu_seconds(header["cpu_seconds"])
        confinement.open_own_proc()
        self._is_stateless = header["once"]
        while True:
            waiter = channel.expect_execution()  # before the end of this one is known to anyone
            channel.begin_execution(header)
            self.run(body or b"{}")
            if self._is_stateless:
                self._exit()
            header, body = channel.wait(channel.NEXT, waiter)

    def prepare(self, confinement: Confinement) -> None:
        """Waits for the code that executions build on, and runs it. The process ends with code that fails."""
        channel = self._channel
        header, body = channel.wait(channel.NEXT, channel.expect_execution())
        confinement.open_own_proc()
        channel.begin_execution(header)
        self._is_stateless = True
        if not self._run(PREPARE_NAME, self._execute_preparation, body or b"{}"):
            self._exit()

    def begin_fork(self, parent: int) -> None:
        """Makes this a runner of a fork's own executions, on the names that there are; `parent` will be its parent."""
        self._channel = Channel(self._shield)
        self._channel.own.forget()
        self._provided_names.clear()  # they ask the host by the channel
        self._parent = parent
        disarm_finalizers()
        self._prepared = dict(self._module.__dict__)  # lives as long as the process: its end is not the execution's

    def run(self, body: bytes) -> None:
        """One execution, from its body to its end frame. Never raises."""
        self._executions += 1
        name = CODE_NAME if self._executions == 1 else f"<code {self._executions}>"
        self._run(name, self._execute, body)

    def _run(self, file_name: str, execute: Callable[[bytes], None], body: bytes) -> bool:
        """Runs it from its body to its end frame; whether it came to its end. Never raises."""
        self._shield.reset()
        self._is_compiled = False
        self._file_name = file_name
        if self._reserve is None:
            try:
                self._reserve = bytes(RESERVE_BYTES)  # and no bytearray, which would be filled, page after page
            except MemoryError:
                pass
        outcome: dict[str, Any] | None = None
        try:
            try:
                self._shield.is_running = True
                execute(body)
            finally:
                self._shield.is_running = False
        except Submitted:
            pass
        except SystemExit as error:
            is_own = os.getpid() == self._channel.process_id
            if (self._refuses_exit and is_own) or (error.code is not None and error.code != 0):
                outcome = self._describe(error)
        except BaseException as error:
            self._reserve = None
            try:
                outcome = self._describe(error)
            except BaseException as failure:  # the error's class, or what the code has put into Python's library
                kind = type(error).__qualname__
                text = f"(it could not be described: {type(failure).__qualname__})"
                outcome = {"kind": "code", "type": kind, "message": text, "traceback": "", "exit_code": None}
        if self._shield.interrupted_imports:
            repair_imports(self._shield.interrupted_imports)
        if not self._is_own_process:
            # A process that the code forked has come to the end of the code: not the end of the execution.
            if outcome is not None:
                os.write(2, outcome["traceback"].encode("utf-8", "replace"))
            self._flush()
            os._exit(0 if outcome is None else outcome["exit_code"] or 1)
        self._flush()
        self._report_files()
        status = "finished" if outcome is None or self._shield.has_submitted else "error"
        header = {"op": "end", "token": self._channel.token, "status": status}
        self._channel.send(header, dumps(outcome).encode("utf-8", "replace"))
        return outcome is None

    def _execute_preparation(self, body: bytes) -> None:
        """Runs the code with the volume's names alone: the rest is an execution's."""
        self._give_names(self._volume.make_names())
        starts = ThreadStarts()
        starts.watch()
        try:
            self._compile_and_run(loads(body.decode("utf-8"))["code"])
        except SystemExit as error:
            if error.code is not None and error.code != 0:
                raise
        finally:
            starts.end()
        check_threads()
        import_common_modules()
        load_generators()
        gc.collect()
        self._flush()
        self._files.write_inherited()
        gc.freeze()  # a collection touches every page that a fork would otherwise share
        gc.disable()

    def _execute(self, body: bytes) -> None:
        self._volume.begin_execution()
        request = loads(body.decode("utf-8"))
        self._refuses_exit = request.get("refuse_exit", False)
        if self._parent and self._executions == 1:
            seed_generators(request.get("seed"))
        namespace = self._module.__dict__
        number = self._channel.number
        displays = self._displays = Displays(self._send_shown)
        report = make_report(self._channel.call_host, lambda: self._submit(number, b"{}"))
        self._give_names({**self._provide_names(request["queries"]), "report": report, "display": displays.display})
        for name in request["names"]:
            namespace[name] = self._make_tool(name)
        namespace["SUBMIT"] = self._make_submit(number, request["output_fields"])
        variables, nonfinite = request["variables"], request.get("nonfinite", {})
        for name, path in request.get("files", {}).items():  # of values that were too large for a frame
            variables[name], more = loads(take_file(path).decode("utf-8"))
            nonfinite.update(more)
        restore_numbers(variables, nonfinite)
        namespace.update(variables)
        functions = {name: namespace[name] for name in ("SUBMIT", *request["names"])}
        self._main.add_names(variables, {**self._given_names, **functions})
        try:
            value = self._compile_and_run(request["code"])
            if value is not None and self._is_own_process:
                displays.send_value(value)
        except SystemExit as error:  # SUBMIT among them
            if not error.code and self._is_own_process:
                displays.show_figures()
            raise
        if self._is_own_process:
            displays.show_figures()
            if self._is_stateless:
                self._finish_as_script()

    @property
    def _is_own_process(self) -> bool:
        """Whether this is no process that the code has forked."""
        return os.getpid() == self._channel.process_id

    def _send_shown(self, kind: str, body: bytes) -> None:
        """Sends what the code shows. A thread that an earlier execution has left sends it to nobody."""
        self._channel.check_process("display")
        with self._shield:
            self._channel.send({"op": kind, "token": self._channel.token}, body)

    def _show_figures(self) -> None:
        if self._displays is not None:
            self._displays.show_figures()

    def _compile_and_run(self, source: str) -> Any:
        """Runs the code; returns the value of its last statement, None where that is no expression."""
        gc.disable()  # Python 3.11 raises SystemError where a finalizer parses text in the middle of this
        parts, expression = compile_code(source, self._file_name)
        self._is_compiled = True
        self._main.begin(self._folder, self._file_name, source)
        namespace = self._module.__dict__
        codes = parts if expression is None else [*parts, expression]
        self._settings.enter()
        try:
            for code in codes:
                if code.co_flags & IS_COROUTINE:
                    return self._await(codes)
            for part in parts:
                exec(part, namespace)
            return None if expression is None else eval(expression, namespace)
        finally:
            self._settings.leave()

    def _await(self, codes: list[CodeType]) -> Any:
        """The same for code that awaits. What it has left behind on its event loop stays in a context alone."""
        has_ended = False
        try:
            value = self._coroutines.run(await_codes(codes, self._module.__dict__))
            has_ended = True
            return value
        finally:
            if self._is_stateless:
                # At the end of an execution threads are waited for anyway, unless it submits; not so in a preparation.
                self._coroutines.close(joins_threads=has_ended and not self._executions)

    def _provide_names(self, can_query: bool) -> dict[str, Any]:
        """The names that every execution finds, made once; `can_query` if there is a model behind the queries."""
        if can_query not in self._provided_names:
            query_names = make_query_names(self._channel.call_host if can_query else None)
            self._provided_names[can_query] = {**self._volume.make_names(), **query_names}
        return self._provided_names[can_query]

    def _give_names(self, names: dict[str, Any]) -> None:
        """Puts them among the code's; one that the code has defined itself, in `prepare` or an earlier step, is its."""
        namespace, given = self._module.__dict__, self._given_names
        for name, value in names.items():
            if name not in namespace or (name in given and namespace[name] is given[name]):
                namespace[name] = given[name] = value

    def _make_tool(self, name: str) -> Callable[..., Any]:
        def tool(*args: Any, **kwargs: Any) -> Any:
            return self._channel.call_host(name, args, kwargs)

        tool.__name__ = tool.__qualname__ = name
        return tool

    def _make_submit(self, number: int, expected: list[dict[str, str]] | None) -> Callable[..., NoReturn]:
        channel = self._channel

        def submit(*values: Any, **fields: Any) -> NoReturn:
            """Ends the execution and hands the fields back."""
            channel.check_process("SUBMIT")
            if number != channel.number or not channel.is_current_thread:
                raise Submitted  # an earlier execution's, or from a thread that one left behind
            limit = getrecursionlimit()
            setrecursionlimit(limit + DRIVER_DEPTH)  # code may call this from the depth of a recursion
            try:
                self._submit(number, encode_submission(values, fields, expected))
            finally:
                setrecursionlimit(limit)

        submit.__name__ = submit.__qualname__ = "SUBMIT"
        return submit

    def _submit(self, number: int, body: bytes) -> NoReturn:
        """Ends the execution with that number, from any of its threads, with the JSON of its fields."""
        channel, shield = self._channel, self._shield
        if number != channel.number or not channel.is_current_thread:
            raise Submitted
        with shield:
            with channel.lock:
                is_first, shield.has_submitted = not shield.has_submitted, True
            is_main = shield.get_thread_id() == shield.main_thread
            if is_first:
                # A fork cannot signal itself where the filter of the process that was forked looks at signals.
                header = {"op": "submit", "token": channel.token, "interrupt": not is_main and self._parent > 0}
                channel.send(header, body)
        if not is_main:
            if not self._parent:
                signal.pthread_kill(shield.main_thread, signal.SIGINT)
            raise SystemExit  # which is how a thread ends without a word
        raise Submitted

    def _finish_as_script(self) -> None:
        """Waits for the threads that the code started, and runs what it registered for its exit."""
        threading: Any = MODULES.get("threading")
        shutdown = getattr(threading, "_shutdown", None)
        if callable(shutdown):
            try:
                shutdown()
            except Exception as error:  # the code has changed that module
                os.write(2, self._format_traceback(error).encode("utf-8", "replace"))
        _run_exitfuncs()

    def _flush(self) -> None:
        """Writes out what the streams hold: the code's own first, for they may write to ours."""
        for name in ("stdout", "stderr"):
            for streams in (vars(sys), self._streams):
                try:
                    streams[name].flush()
                except BaseException:  # the code may have put anything there, or closed it
                    pass

    def _report_files(self) -> None:
        if self._volume.root is not None:
            files = self._volume.list_written()
            if files:
                header = {"op": "files", "token": self._channel.token}
                self._channel.send(header, dumps(files).encode("utf-8", "replace"))

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """What the host is told of the error that ended the code."""
        if isinstance(error, MemoryError):
            if self._is_stateless:
                self._module.__dict__.clear()
            _clear_frames(error)
        line = self._find_line(error)  # before the traceback is trimmed
        try:
            message = str(error)
        except BaseException:
            message = "(its message could not be read)"
        text = self._format_traceback(error)
        code: Any = error.code if isinstance(error, SystemExit) else None
        return {
            "kind": self._find_kind(error),
            "type": type(error).__qualname__,
            "message": message[:MAX_TRACEBACK_CHARACTERS],
            "traceback": text,
            "exit_code": code if type(code) is int and abs(code) < 1 << 31 else None,
            "line": line,
            "limit": find_limit(error),
        }

    def _format_traceback(self, error: BaseException) -> str:
        self._main.show_lines()  # the code may have cleared them
        try:
            return _format_traceback(error)
        except BaseException:  # the code may have changed anything that makes it
            return _format_plainly(error, self._main.sources)

    def _find_kind(self, error: BaseException) -> str:
        kinds = {
            "memory": MemoryError, "submit": SubmitError, "volume": VolumeError, "exit": SystemExit,
            "threads": ThreadsLeftError,
        }  # fmt: skip
        for name, kind in kinds.items():
            if isinstance(error, kind):
                return name
        if isinstance(error, SystemError) and error.args == (NO_EXCEPTION,) and _has_filled_memory():
            return "memory"
        if not self._is_compiled and isinstance(error, (SyntaxError, ValueError, RecursionError, OverflowError)):
            return "syntax"
        return "code"

    def _find_line(self, error: BaseException) -> int | None:
        """The line of the code that failed: the innermost that is the code's own."""
        if isinstance(error, SyntaxError) and not self._is_compiled:
            return error.lineno
        line, trace = None, get_traceback(error)
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._file_name:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def _exit(self) -> NoReturn:
        """Ends the process as a script's would."""
        try:
            self._module.__dict__.clear()  # closes, and so writes out, the files that the code left open
            self._files.write_at_end()
            self._main.remove_files()
        finally:
            os._exit(0)


# A class of the code's may have a property of that name.
get_traceback: Any = BaseException.__dict__["__traceback__"].__get__


def _has_filled_memory() -> bool:
    """Whether the process has held most of the memory that it may have."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return limit != resource.RLIM_INFINITY and held > limit * FILLED_SHARE


def _clear_frames(error: BaseException) -> None:
    """Lets go of the local variables on the way of an error, so that there is memory to report with."""
    trace = get_traceback(error)
    while trace is not None:
        try:
            trace.tb_frame.clear()
        except RuntimeError:
            pass  # a frame that is still running: the driver's own
        trace = trace.tb_next


def _format_traceback(error: BaseException) -> str:
    import traceback

    first = get_traceback(error)
    while first is not None and first.tb_frame.f_code.co_filename.startswith(DRIVER_FILE_PREFIX):
        first = first.tb_next
    trace = first
    last: Any = None
    while trace is not None:  # and the driver's frames at the other end: SUBMIT's, a tool's, the interrupt's
        if trace.tb_frame.f_code.co_filename.startswith(DRIVER_FILE_PREFIX):
            break
        last, trace = trace, trace.tb_next
    if last is not None:
        last.tb_next = None
    text = "".join(traceback.format_exception(type(error), error, first))
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return text


def _format_plainly(error: BaseException, sources: dict[str, str]) -> str:
    """A traceback of the code's own frames that takes nothing of Python's library."""
    lines = ["Traceback (most recent call last):"]
    trace = get_traceback(error)
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(DRIVER_FILE_PREFIX):
            lines.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
            source = sources.get(code.co_filename, "").split("\n")
            lines += [f"    {line.strip()}" for line in source[trace.tb_lineno - 1 : trace.tb_lineno]]
        trace = trace.tb_next
    try:
        message = str(error)
    except BaseException:
        message = "(its message could not be read)"
    text = "\n".join([*lines, f"{type(error).__qualname__}: {message}", ""])
    return text[:MAX_TRACEBACK_CHARACTERS]
