"""The runner of code in a child: it sets up globals and streams, and reports the outcome to the host."""

from __future__ import annotations

import gc
import os
import resource
import sys
from _thread import get_ident
from atexit import _run_exitfuncs  # type: ignore[reportPrivateUsage]
from sys import getrecursionlimit, setprofile, setrecursionlimit, settrace

from ...wire.frames import EXITED, take_file
from ...wire.nonfinite import restore_numbers
from ...wire.strict_json import dumps, loads
from ..processes import signal
from .channel import Channel, InterruptShield
from .displays import PYPLOT, Displays
from .environment import MODULES, ImportWatcher, open_streams
from .error_report import clear_frames, describe_error, format_traceback
from .evaluation import IS_COROUTINE, CoroutineRunner, compile_code, silence_driver_errors
from .forking import (
    OpenFiles,
    check_threads,
    disarm_finalizers,
    import_common_modules,
    load_generators,
    seed_generators,
)
from .main_module import CODE_NAME, MainModule
from .queries import make_query_names
from .submit import Submitted, encode_submission, make_report
from .volume import Volume

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any, NoReturn

    from ..confinement import Confinement

PREPARE_NAME = "<prepare>"
SHADOWED_NAMES = ("report", "display")  # Instructions of models lack these names, so code may use them.
DRIVER_DEPTH = 500  # stack frames, enough to describe an error
REHEARSAL = b'{"code":"x = 0","names":[],"output_fields":null,"queries":false,"variables":{}}'
RESERVE_BYTES = 4 * 1024 * 1024  # untouched address space, freed to describe an error


class CodeRunner:
    """A runner of the executions of one child: a single execution, or those of a context, whose globals stay.

    Create it once, in the process that children are forked from: in each child this would take half a millisecond,
    mostly for the memory pages that it writes to. It replaces the main module and the streams of that process.
    """

    def __init__(self) -> None:
        self._shield = InterruptShield()
        self._channel = Channel(self._shield)
        self._coroutines = CoroutineRunner()
        self._main = MainModule()
        self._module = self._main.module
        self._folder = "/"  # the code's working folder
        self._is_stateless = self._is_compiled = False
        self._executions = 0
        self._refuses_exit = False  # `sys.exit(0)` in the current execution is an error
        self._prepared: dict[str, Any] = {}
        self._files = OpenFiles()
        self._parent = 0  # the supervisor's id, in a fork of a prepared process
        self._file_name = CODE_NAME
        self._reserve: bytes | None = None
        self._common_names: dict[bool, dict[str, Any]] = {}  # key: True with a language model
        self._driver_names: dict[str, Any] = {}  # names that the driver added, with the values it last set
        self._turn_names: dict[str, Any] = {}  # names that each turn of a model finds unchanged
        self._displays: Displays | None = None  # displays of the current execution
        self._volume = Volume(None, False, self._shield)  # replaced when the settings arrive
        for can_query in (False, True):
            self._find_common_names(can_query)
        self._become_main()

    def _become_main(self) -> None:
        """Install what code finds in `sys` and `builtins`, and the driver itself does not need."""
        watcher = ImportWatcher()
        self._main.install(watcher)
        self._streams = open_streams()
        watcher.actions["asyncio.base_events"] = silence_driver_errors
        watcher.actions[PYPLOT] = self._replace_show
        sys.meta_path.insert(0, watcher)
        import builtins

        # `site` would make these; model-written code uses them.
        for name, function in (("exit", sys.exit), ("quit", sys.exit), ("help", _show_help)):
            if not hasattr(builtins, name):
                setattr(builtins, name, function)

    def _replace_show(self, pyplot: Any) -> None:
        """Replace pyplot's `show`, which only warns if there is no screen."""

        def show(*_arguments: Any, **_options: Any) -> None:
            if self._displays is not None:
                self._displays.show_figures()

        pyplot.show = show

    def enter_process(self) -> None:
        """Prepare the calling process for code: handle its interrupts, and send frames in its name."""
        self._channel.process_id = os.getpid()
        self._shield.handle_interrupts()

    def rehearse(self) -> None:
        """Run an empty execution and undo its effects. Only its end frame on the channel remains.

        A fork copies a memory page of its parent when it first writes to it. After this, a real execution need not wait
        for these copies.
        """
        names = dict(self._module.__dict__)
        self.run(REHEARSAL)
        gc.disable()
        self._module.__dict__.clear()
        self._module.__dict__.update(names)
        self._main.reset()
        self._displays = None
        self._executions = 0
        self._driver_names, self._turn_names = {}, {}

    def wait_for_settings(self) -> dict[str, Any]:
        """Wait for the sandbox's settings; a process forked ahead gets them before any execution."""
        return loads(self._channel.wait_for_settings().decode("utf-8"))  # type: ignore[reportReturnType]

    def apply_settings(self, settings: dict[str, Any]) -> None:
        is_shared = settings["confinement"].get("umask") is not None
        if settings["volume"] is not None:
            self._volume = Volume(settings["volume"], is_shared, self._shield)
            self._common_names.clear()
        # The working folder comes last, so that files of an execution do not replace library modules.
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.append(settings["cwd"])
        self._folder = settings["cwd"]
        # The supervisor does not get this path: it could run these modules in place of library modules.
        sys.path[:0] = settings["python_path"]

    def serve(self, confinement: Confinement) -> NoReturn:
        """Run one execution without a context and end, or run the executions of a context, which share globals."""
        channel = self._channel
        header, body = channel.wait(channel.NEXT, channel.expect_execution())
        if self._parent:
            confinement.end_with_parent(self._parent)  # By now the supervisor is this process's parent.
        if "cpu_seconds" in header:
            confinement.lower_limit(resource.RLIMIT_CPU, header["cpu_seconds"])
        confinement.open_own_proc()
        self._is_stateless = header["once"]
        while True:
            waiter = channel.expect_execution()  # It must exist before the supervisor sees the end of this execution.
            channel.begin_execution(header)
            self.run(body or b"{}")
            if self._is_stateless:
                self._exit()
            header, body = channel.wait(channel.NEXT, waiter)

    def prepare(self, confinement: Confinement) -> None:
        """Wait for the code of `prepare` and run it. The process ends if the code fails."""
        channel = self._channel
        header, body = channel.wait(channel.NEXT, channel.expect_execution())
        confinement.open_own_proc()
        channel.begin_execution(header)
        self._is_stateless = True
        if not self._run(PREPARE_NAME, self._execute_preparation, body or b"{}"):
            self._exit()

    def begin_fork(self, parent: int) -> None:
        """Make this the runner of a fork of the code's process. `parent` is the supervisor, which adopts the fork."""
        self._channel = Channel(self._shield)
        self._channel.own.forget()
        self._common_names.clear()  # Their functions use the old channel.
        self._parent = parent
        disarm_finalizers()
        self._prepared = dict(self._module.__dict__)  # keeps the values beyond the execution's end

    def run(self, body: bytes) -> None:
        self._executions += 1
        name = CODE_NAME if self._executions == 1 else f"<code {self._executions}>"
        self._run(name, self._execute, body)

    def _run(self, file_name: str, execute: Callable[[bytes], None], body: bytes) -> bool:
        """Run `execute` and send the end frame; return whether the code ended without an error. Never raises."""
        self._shield.reset()
        self._is_compiled = False
        self._file_name = file_name
        if self._reserve is None:
            try:
                self._reserve = bytes(RESERVE_BYTES)  # a bytearray would be filled page by page
            except MemoryError:
                pass
        outcome: dict[str, Any] | None = None
        has_exited = False  # the code ended by exit(), with the status of success
        try:
            self._run_interruptible(execute, body)
        except Submitted:
            pass
        except SystemExit as error:
            refuses_exit = self._refuses_exit and self._is_own_process
            if refuses_exit or error.code not in (None, 0):
                outcome = self._describe(error)
            else:
                has_exited = self._is_own_process
        except BaseException as error:
            outcome = self._describe(error)
        if not self._is_own_process:
            self._end_fork_of_code(outcome)
        self._flush()
        files = self._volume.list_written()
        if files:
            self._channel.send({"op": "files", "token": self._channel.token}, dumps(files).encode("utf-8", "replace"))
        self._send_end(outcome, has_exited)
        return outcome is None

    def _run_interruptible(self, execute: Callable[[bytes], None], body: bytes) -> None:
        try:
            self._shield.accepts_interrupts = True
            execute(body)
        finally:
            self._shield.accepts_interrupts = False

    def _end_fork_of_code(self, outcome: dict[str, Any] | None) -> NoReturn:
        """End this process, which the code forked. Its end does not end the execution."""
        if outcome is not None:
            os.write(2, outcome["traceback"].encode("utf-8", "replace"))
        self._flush()
        if outcome is None:
            os._exit(0)
        os._exit(outcome["exit_code"] or 1)

    def _send_end(self, outcome: dict[str, Any] | None, has_exited: bool) -> None:
        status = "finished" if outcome is None or self._shield.has_submitted else "error"
        header: dict[str, Any] = {"op": "end", "token": self._channel.token, "status": status}
        if not self._is_stateless:  # The process continues, so the kernel does not report its usage.
            own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
            header["cpu_microseconds"] = int(seconds * 1e6)
            header["peak_kib"] = max(own.ru_maxrss, children.ru_maxrss)
        body = EXITED if has_exited else dumps(outcome).encode("utf-8", "replace")
        self._channel.send(header, body)

    def _execute_preparation(self, body: bytes) -> None:
        """Run the code of `prepare`, with the volume's names only: the other names belong to executions."""
        self._add_names(self._volume.make_names())
        try:
            self._compile_and_run(loads(body.decode("utf-8"))["code"])
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        check_threads()
        import_common_modules()
        load_generators()
        gc.collect()
        self._flush()
        self._files.write_inherited()
        gc.freeze()  # a collection touches every page that forks would share
        gc.disable()

    def _execute(self, body: bytes) -> None:
        self._volume.begin_execution()
        request = loads(body.decode("utf-8"))
        self._refuses_exit = request.get("refuse_exit", False)
        if self._parent and self._executions == 1:
            seed_generators(request.get("seed"))
        is_turn = self._refuses_exit and not self._is_stateless  # a turn of a model
        displays = self._displays = Displays(self._send_shown)
        variables = _read_variables(request)
        self._set_names(request, variables, displays, is_turn=is_turn)
        try:
            value = self._compile_and_run(request["code"])
            if value is not None and self._is_own_process:
                displays.send_value(value)
        except SystemExit as error:  # SUBMIT raises it too
            if not error.code and self._is_own_process:
                displays.show_figures()
            raise
        finally:
            if is_turn and self._is_own_process:
                self._note_changed_names(variables)
        if self._is_own_process:
            displays.show_figures()
            if self._is_stateless:
                self._finish_as_script()

    def _set_names(
        self, request: dict[str, Any], variables: dict[str, Any], displays: Displays, *, is_turn: bool
    ) -> None:
        """Set the globals that the execution finds: the driver's names, tools, SUBMIT and variables."""
        namespace = self._module.__dict__
        if is_turn:
            namespace.update(self._turn_names)
        number = self._channel.number
        report = make_report(self._channel.call_host, lambda: self._submit(number, b"{}"))
        common_names = self._find_common_names(request["queries"])
        self._add_names({**common_names, "report": report, "display": displays.display})
        docs = request.get("docs", {})
        functions: dict[str, Any] = {"SHOW_VARS": self._list_variables} if is_turn else {}
        functions.update({name: self._make_tool(name, docs.get(name)) for name in request["names"]})
        functions["SUBMIT"] = self._make_submit(number, request["output_fields"])
        namespace.update(functions)
        namespace.update(variables)
        self._main.add_names(variables, {**self._driver_names, **functions})
        if is_turn:
            for name, value in self._driver_names.items():
                if namespace[name] is value and name not in SHADOWED_NAMES:
                    self._turn_names[name] = value
            self._turn_names.update(functions)

    def _list_variables(self) -> dict[str, str]:
        """Return the types of the names that a model's code has defined, as SHOW_VARS() of other recursive models."""
        functions = {name: value for name, value in self._turn_names.items() if callable(value)}
        ours = {**functions, **self._driver_names}
        return {
            name: type(value).__name__
            for name, value in self._module.__dict__.items()
            if not (name.startswith("_") or (name in ours and ours[name] is value))
        }

    def _note_changed_names(self, variables: dict[str, Any]) -> None:
        """Keep the turn's variables as the code left them, and tell the model which other names the code changed."""
        namespace = self._module.__dict__
        for name in variables:
            if name in namespace:
                self._turn_names[name] = namespace[name]
        changed = [name for name, value in self._turn_names.items() if namespace.get(name) is not value]
        if changed:
            self._flush()
            names = ", ".join(changed)
            os.write(1, f"(Your code changed {names}: later code finds what was there before.)\n".encode())

    @property
    def _is_own_process(self) -> bool:
        return os.getpid() == self._channel.process_id

    def _send_shown(self, kind: str, body: bytes) -> None:
        """Send a shown value or a display. The supervisor ignores what threads of earlier executions send."""
        self._channel.check_process("display")
        with self._shield:
            self._channel.send({"op": kind, "token": self._channel.token}, body)

    def _compile_and_run(self, source: str) -> Any:
        """Run the code and return the value of its last statement, or None if that is not an expression."""
        gc.disable()  # Python 3.11 raises SystemError if a finalizer parses text during compilation
        parts, expression = compile_code(source, self._file_name)
        self._is_compiled = True
        self._main.begin(self._folder, self._file_name, source)
        namespace = self._module.__dict__
        codes = parts if expression is None else [*parts, expression]
        gc.enable()
        try:
            for code in codes:
                if code.co_flags & IS_COROUTINE:
                    return self._await(codes)
            for part in parts:
                exec(part, namespace)
            return None if expression is None else eval(expression, namespace)
        finally:
            setprofile(None)
            settrace(None)
            if getrecursionlimit() < DRIVER_DEPTH:
                setrecursionlimit(DRIVER_DEPTH)

    def _await(self, codes: list[CodeType]) -> Any:
        """Run code that awaits. Its event loop stays only in a context."""
        if not self._is_stateless:
            return self._coroutines.run(codes, self._module.__dict__)
        has_ended = False
        try:
            value = self._coroutines.run(codes, self._module.__dict__)
            has_ended = True
            return value
        finally:
            self._coroutines.close(joins_threads=has_ended)

    def _find_common_names(self, can_query: bool) -> dict[str, Any]:
        """Return the names that every execution finds; `can_query` is True if there is a language model."""
        if can_query not in self._common_names:
            call_host = self._channel.call_host if can_query else None
            query_names = make_query_names(call_host)
            self._common_names[can_query] = {**self._volume.make_names(), **query_names}
        return self._common_names[can_query]

    def _add_names(self, names: dict[str, Any]) -> None:
        """Add names to the code's globals, but keep those that the code defined in `prepare` or an earlier step."""
        namespace, driver_names = self._module.__dict__, self._driver_names
        for name, value in names.items():
            is_unchanged = name in driver_names and namespace.get(name) is driver_names[name]
            if is_unchanged or name not in namespace:
                namespace[name] = driver_names[name] = value

    def _make_tool(self, name: str, doc: str | None) -> Callable[..., Any]:
        def tool(*args: Any, **kwargs: Any) -> Any:
            return self._channel.call_host(name, args, kwargs)

        tool.__name__ = tool.__qualname__ = name
        tool.__doc__ = doc
        return tool

    def _make_submit(self, number: int, expected: list[dict[str, str]] | None) -> Callable[..., NoReturn]:
        channel = self._channel

        def submit(*values: Any, **fields: Any) -> NoReturn:
            """End the execution and return the fields to the caller."""
            channel.check_process("SUBMIT")
            self._end_unless_current(number)
            limit = getrecursionlimit()
            setrecursionlimit(limit + DRIVER_DEPTH)  # code may call this deep in a recursion
            try:
                self._submit(number, encode_submission(values, fields, expected))
            finally:
                setrecursionlimit(limit)

        submit.__name__ = submit.__qualname__ = "SUBMIT"
        return submit

    def _end_unless_current(self, number: int) -> None:
        """End the calling thread if an earlier execution started it or defined the function that it calls.

        `number` is the execution that defined the function, such as SUBMIT. Raises Submitted.
        """
        if number != self._channel.number or not self._channel.is_current_thread:
            raise Submitted

    def _submit(self, number: int, body: bytes) -> NoReturn:
        """End the execution with that number, from any of its threads, with the JSON of its fields."""
        channel, shield = self._channel, self._shield
        self._end_unless_current(number)
        is_main = get_ident() == shield.main_thread
        with shield:
            with channel.lock:
                is_first = not shield.has_submitted
                shield.has_submitted = True
            if is_first:
                # A fork cannot signal itself if its inherited seccomp filter checks signals, so the supervisor does it.
                needs_interrupt = not is_main and self._parent > 0
                header = {"op": "submit", "token": channel.token, "interrupt": needs_interrupt}
                channel.send(header, body)
        if is_main:
            raise Submitted
        if not self._parent:
            signal.pthread_kill(shield.main_thread, signal.SIGINT)
        raise SystemExit  # ends a thread without a message

    def _finish_as_script(self) -> None:
        """Wait for the threads that the code started, and run its exit functions."""
        threading: Any = MODULES.get("threading")
        shutdown = getattr(threading, "_shutdown", None)
        if callable(shutdown):
            try:
                shutdown()
            except Exception as error:  # the code has changed `threading`
                os.write(2, format_traceback(error).encode("utf-8", "replace"))
        _run_exitfuncs()

    def _flush(self) -> None:
        for name in ("stdout", "stderr"):
            for streams in (vars(sys), self._streams):
                try:
                    streams[name].flush()
                except BaseException:  # the code may have closed or replaced them
                    pass

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """Return the outcome of code that raised an error. Never raises."""
        self._reserve = None
        try:
            if isinstance(error, MemoryError):
                if self._is_stateless:
                    self._module.__dict__.clear()
                clear_frames(error)
            self._main.show_lines()  # The code may have cleared the lines.
            return describe_error(error, self._file_name, is_compiled=self._is_compiled)
        except BaseException as failure:  # a broken error class, or a changed standard library
            text = f"(it could not be described: {type(failure).__qualname__})"
            return {
                "kind": "code", "type": type(error).__qualname__, "message": text, "traceback": "", "exit_code": None,
            }  # fmt: skip

    def _exit(self) -> NoReturn:
        try:
            self._module.__dict__.clear()  # closes the files that the code left open, which writes them out
            self._files.write_at_end()
            self._main.remove_files()
        finally:
            os._exit(0)


def _read_variables(request: dict[str, Any]) -> dict[str, Any]:
    """Return the execution's variables. Those that are too large for a frame are in files."""
    variables, nonfinite = request["variables"], request.get("nonfinite", {})
    for name, path in request.get("files", {}).items():
        variables[name], numbers = loads(take_file(path).decode("utf-8"))
        nonfinite.update(numbers)
    restore_numbers(variables, nonfinite)
    return variables


def _show_help(*objects: Any) -> None:
    """Print the documentation of an object, or of `help` itself."""
    import pydoc

    pydoc.help(*objects)
