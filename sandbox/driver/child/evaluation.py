"""The compilation of code, and the event loop for code that awaits at its top level, as in a notebook.

The last statement is compiled apart if it is an expression, because its value is shown. `asyncio` is imported only for
code that awaits.
"""

from __future__ import annotations

from .channel import Interrupted
from .submit import Submitted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

IS_COROUTINE = 0x80  # inspect.CO_COROUTINE
ONLY_AST = 0x400  # ast.PyCF_ONLY_AST
TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT: changes only code that awaits
OPERATORS = " +-*/%&|^@"  # operators of augmented assignments, and blanks
UNCERTAIN = frozenset("()[]{}'\"#;\\\n")  # A line with one of these may not be exactly one statement.


def compile_code(source: str, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    """Compile code. Return its statements, as at most one code object, and its last expression.

    The expression is compiled apart if the last statement is one, or else None.
    """
    if not _has_no_value(source):
        try:
            return _compile_apart(source, file_name)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # The code is wrong. Or it is nested deeply: a tree reaches the limit sooner than its text.
    return [_compile(source, file_name)], None


def _compile_apart(source: str, file_name: str) -> tuple[list[CodeType], CodeType | None]:
    """Compile a last statement that is an expression apart from the statements before it."""
    tree: Any = _compile(source, file_name, flags=ONLY_AST)
    expression: CodeType | None = None
    if tree.body and type(tree.body[-1]).__name__ == "Expr":
        expression_tree: Any = _compile("0", file_name, "eval", ONLY_AST)
        expression_tree.body = tree.body.pop().value
        expression = _compile(expression_tree, file_name, "eval")
    return [_compile(tree, file_name)] if tree.body else [], expression


def _has_no_value(source: str) -> bool:
    """Return whether the last statement certainly assigns to a name or calls SUBMIT, which does not return.

    Most code ends this way. It needs no tree, which takes as long as compiling: 0.1 ms or more in a new process.
    """
    text = source.rstrip()
    start = text.rfind("\n") + 1
    while start and text.startswith((" ", "\t", ")"), start):  # a line that continues the one before it
        start = text.rfind("\n", 0, start - 1) + 1
    last = text[start:]
    if last.startswith("SUBMIT("):
        return "'''" not in last and '"""' not in last
    target, _, value = last.partition("=")
    is_name = target.rstrip(OPERATORS).isidentifier()  # as in `x = 1` and `x += 1`
    is_assignment = is_name and value[:1] not in ("", "=")
    return is_assignment and UNCERTAIN.isdisjoint(last)


def _compile(source: Any, file_name: str, mode: str = "exec", flags: int = 0) -> Any:
    return compile(source, file_name, mode, flags | TOP_LEVEL_AWAIT, dont_inherit=True)


async def _await_codes(codes: list[CodeType], namespace: dict[str, Any]) -> Any:
    value = None
    for code in codes:
        value = eval(code, namespace)
        if code.co_flags & IS_COROUTINE:
            value = await value
    return value


class CoroutineRunner:
    """A runner of code that awaits, on one event loop. The loop stays open until `close`, and pauses between codes."""

    def __init__(self) -> None:
        self._loop: Any = None

    def run(self, codes: list[CodeType], namespace: dict[str, Any]) -> Any:
        """Run pieces of code in order, and return the value of the last one if it is an expression.

        SUBMIT or an interrupt in any task ends the run. Then the main task is cancelled.
        """
        import asyncio

        loop = self._open_loop()
        main = loop.create_task(_await_codes(codes, namespace))
        try:
            return loop.run_until_complete(main)
        except BaseException as error:
            if not main.done():
                main.cancel()
                try:
                    loop.run_until_complete(main)
                except asyncio.CancelledError as cancelled:
                    if isinstance(error, Interrupted):
                        error.__traceback__ = cancelled.__traceback__  # It shows where the code waited.
                except BaseException:
                    pass  # the code's own error in a `finally` block, or another interrupt
            trace: Any = error.__traceback__
            hidden_packages = (__package__, "asyncio")
            while trace is not None and trace.tb_frame.f_globals.get("__package__") in hidden_packages:
                trace = trace.tb_next
            error.__traceback__ = trace
            raise

    def close(self, *, joins_threads: bool) -> None:
        """Cancel the remaining tasks and close the loop, as `asyncio.run` does. Wait for its threads if asked."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        import asyncio

        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        if joins_threads:
            loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()

    def _open_loop(self) -> Any:
        import asyncio

        loop = self._loop
        if loop is None or loop.is_closed():  # the code may have closed it
            loop = self._loop = asyncio.new_event_loop()
        else:
            # A new executor, because a thread and its output belong to the execution that started the thread.
            from concurrent.futures import ThreadPoolExecutor

            loop.set_default_executor(ThreadPoolExecutor())
        asyncio.set_event_loop(loop)  # `asyncio.run` in earlier code unsets it
        return loop


def silence_driver_errors(base_events: Any) -> None:
    """Stop event loops from reporting tasks that ended with Submitted or Interrupted, which the driver raises."""
    handle = base_events.BaseEventLoop.default_exception_handler

    def default_exception_handler(self: Any, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), (Submitted, Interrupted)):
            handle(self, context)

    base_events.BaseEventLoop.default_exception_handler = default_exception_handler
