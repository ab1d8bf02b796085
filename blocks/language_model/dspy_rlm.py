"""Recursive queries: a `dspy.RLM` whose Python runs in a separate context of the asking code's sandbox.

DSPy's loop and its callbacks are synchronous, so each recursive query runs in a thread. A bridge runs the thread's
coroutines on the event loop until the query ends. Importing this module imports DSPy.
"""

import asyncio
import concurrent.futures
import logging
import math
import threading
import uuid
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import dspy
from dspy import lm15
from dspy.signatures.signature import make_signature

from ...sandbox.cancellation import run_shielded
from ...sandbox.errors import QueryError, RlmBatchError
from ...sandbox.interpreter import Interpreter
from ...sandbox.queries.budget import Usage
from ...sandbox.queries.recursion import Queries, QueryContext
from ...sandbox.queries.session import Message, Query, QuerySession
from ...sandbox.result import Result
from ...sandbox.thread_pool import ThreadPool
from ..dspy_interpreter import DSPyInterpreter, Run
from .credentials import hide_environment_credentials

T = TypeVar("T")

MAX_TURNS = 20  # Turns of a recursive model, as in DSPy.
DEFAULT_CALLS = 50  # The number of calls in the model's instructions if there is no limit.
# Signatures are parsed once, at import. In query threads Python 3.11 sometimes fails with SystemError when threads
# create syntax trees at the same time (python/cpython#106905).
SIGNATURE = make_signature("query -> answer: str")
SIGNATURE_WITH_CONTEXT = make_signature("context, query -> answer: str")
TURN_LENGTH = 10_000  # characters of a turn's output in the trajectory, as many as the model sees

_threads = ThreadPool()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for DSPy's line about unavailable sub-agents, which rlm-batch refuses in every query."""
    return not record.getMessage().startswith("RLM sub-agents are unavailable")


@dataclass(eq=False)
class _Ended(BaseException):
    """An error that unwinds DSPy's thread. It is not an Exception, because DSPy catches those and tries alternatives.

    `error` is the query's error, or None if the query was cancelled.
    """

    error: RlmBatchError | None


class _Bridge:
    """A bridge that runs coroutines on the event loop for a thread, until `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._ended = False
        self._in_flight: set[concurrent.futures.Future[Any]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise its error. Raises _Ended after `end`."""
        with self._lock:
            if self._ended:
                work.close()
                raise _Ended(None)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._in_flight.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _Ended(None) from None
        finally:
            with self._lock:
                self._in_flight.discard(future)

    def end(self) -> None:
        """Cancel the running coroutines, and refuse new ones."""
        with self._lock:
            self._ended, futures = True, list(self._in_flight)
        for future in futures:
            future.cancel()


@dataclass(eq=False, repr=False)
class _Engine:
    """A model engine for DSPy that asks rlm-batch's budgeted model. `turn_usage` is the usage of the current turn."""

    bridge: _Bridge
    session: QuerySession
    query: Query
    turn_usage: Usage = field(default_factory=Usage)

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Ask the model. Raises _Ended if the budget forbids it or the model does not answer."""
        try:
            messages = to_openai_messages(request)
            answer = self.bridge.run(self.session.ask(self.session.root_model, messages, self.query))
        except RlmBatchError as error:
            raise _Ended(error) from None
        self.turn_usage += answer.usage
        usage = lm15.Usage(input_tokens=answer.usage.prompt_tokens, output_tokens=answer.usage.completion_tokens)
        message = lm15.Message.assistant(answer.text)
        return lm15.Response(id=None, model=request.model, message=message, finish_reason="stop", usage=usage)

    def end_turn(self) -> dict[str, Any]:
        """Return the current turn's usage as JSON, and reset it for the next turn."""
        usage, self.turn_usage = self.turn_usage, Usage()
        return asdict(usage)


def to_openai_messages(request: lm15.Request) -> list[Message]:
    """Return the request's messages in OpenAI's form. All are texts, because the signatures have only text fields."""
    system = request.system
    messages: list[Message] = []
    if system is not None:
        text = system if isinstance(system, str) else "".join(getattr(part, "text", "") for part in system)
        messages.append({"role": "system", "content": text})
    messages += [{"role": message.role, "content": message.text or ""} for message in request.messages]
    return messages


@dataclass(eq=False, repr=False)
class SandboxText(dspy.SandboxSerializable):
    """A text that the model's Python can read. The prompts contain only its length and its beginning."""

    context: QueryContext

    def sandbox_setup(self) -> str:
        return ""

    def to_sandbox(self) -> bytes:
        return (self.context.path or self.context.text).encode("utf-8", "surrogatepass")

    def sandbox_assignment(self, var_name: str, data_expr: str) -> str:
        if not self.context.path:
            return f"{var_name} = {data_expr}"
        return (
            f"with open({data_expr}, encoding='utf-8', errors='surrogatepass', newline='') as _file:\n"
            f"    {var_name} = _file.read()\ndel _file"
        )

    def rlm_preview(self, max_chars: int = 500) -> str:
        context = self.context
        text, length = (context.preview, context.length) if context.path else (context.text, len(context.text))
        more = "..." if length > max_chars else ""
        return f"a str of {length:,} characters that begins: {text[:max_chars]}{more}"


class _Factory:
    """A factory for the interpreter of a recursive query, with the instructions for the model."""

    def __init__(self, run: Run, queries: Queries) -> None:
        self._run = run
        recursion = (
            "- `rlm_query(prompt, context=text)` asks a recursive model with a REPL of its own, which finds the text "
            "as `context`: for a part that is itself too long or too intricate for one prompt.\n"
            "- `rlm_query_batched(prompts, concurrency=None, on_error='raise', context=text)` asks several at once.\n"
            if queries.depth < queries.max_depth
            else "- There is no deeper recursion here: `rlm_query` raises DepthExceeded.\n"
        )
        self.execution_instructions = (
            "Code runs as Python 3 in a sandbox with no network; names persist from step to step.\n"
            "- `llm_query_batched(prompts, concurrency=None, on_error='raise')` gives the answers in the order of the "
            "prompts; with on_error='return' an exception object stands where a query failed.\n"
            f"{recursion}"
            "- A query that fails raises QueryError, BudgetExceeded, DepthExceeded or DeadlineExceeded; an error of a "
            "batch has .results and .errors by index."
        )

    def __call__(self) -> DSPyInterpreter:
        return DSPyInterpreter(self._run, lambda: None, lambda: None, asks=True)


async def answer(interpreter: Interpreter, queries: Queries, prompt: str, context: QueryContext, query: Query) -> str:
    """Return a recursive model's answer to the prompt. `queries` serves the model's code, and `query` is the record.

    Raises QueryError, BudgetExceeded and DeadlineExceeded.
    """
    session = queries.session
    context_name = f"rlm-{uuid.uuid4().hex[:12]}"
    bridge = _Bridge()
    engine = _Engine(bridge, session, query)
    logging.getLogger("dspy.predict.rlm").addFilter(_is_worth_a_line)  # Adding it again has no effect.

    async def execute(code: str, variables: dict[str, Any], output_fields: list[dict[str, Any]] | None) -> Result:
        left = session.check_seconds_left()
        return await interpreter.execute(
            code,
            variables,
            timeout=math.inf if left is None else left,
            context=context_name,
            output_fields=output_fields,
            queries=queries,
            index=queries.numbers,
            refuse_exit=True,
        )

    def run(code: str, variables: dict[str, Any], _tools: Any, output_fields: list[dict[str, Any]] | None) -> Result:
        turn: dict[str, Any] = {"code": code, "output": ""}
        if "query" in variables:  # Without it, the code is DSPy's own setup and not a turn.
            turn["usage"] = engine.end_turn()
            query.trajectory.append(turn)
        try:
            result = bridge.run(execute(code, variables, output_fields))
        except RlmBatchError as error:
            turn |= {"output": _shorten(str(error)), "failed": True}
            raise
        turn["output"] = _shorten(result.meta.stdout + result.meta.stderr)
        return result

    def forward() -> str:
        model = dspy.LM(session.root_model.name, engine=engine, cache=False, num_retries=0)
        with dspy.context(lm=model, adapter=dspy.ChatAdapter(), disable_history=True, callbacks=[]):
            calls = session.budget.remaining_calls
            rlm = dspy.RLM(
                SIGNATURE_WITH_CONTEXT if context.path or context.text else SIGNATURE,
                max_iters=MAX_TURNS,
                max_llm_calls=DEFAULT_CALLS if calls is None else calls,
                interpreter_factory=_Factory(run, queries),
            )
            inputs = {"context": SandboxText(context)} if context.path or context.text else {}
            prediction = rlm(query=prompt, **inputs)
        usages = [{"usage": turn["usage"]} for turn in query.trajectory]
        if len(usages) != len(prediction.trajectory):  # A turn had no valid code, so usages do not match turns.
            usages = [{}] * len(prediction.trajectory)
        query.trajectory = [
            {**turn, "output": _shorten(str(turn.get("output", ""))), **usage}
            for turn, usage in zip(prediction.trajectory, usages, strict=True)
        ]
        return str(prediction.answer)

    try:
        return await _threads.run_in_thread(forward)
    except _Ended as ended:
        if ended.error is None:
            raise asyncio.CancelledError from None
        raise ended.error from None
    except RlmBatchError:
        raise
    except Exception as error:  # noqa: BLE001 - no cause: its text may have unmasked output of the model
        first = hide_environment_credentials(str(error).partition("\n")[0])
        raise QueryError(f"the recursive model gave no answer: {type(error).__name__}: {first}") from None
    finally:
        bridge.end()
        await run_shielded(interpreter.forget_context(context_name))


def _shorten(text: str) -> str:
    if len(text) <= TURN_LENGTH:
        return text
    half = TURN_LENGTH // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
