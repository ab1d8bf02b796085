"""A conversation with a recursive language model, for scripts without a flow."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import ValidationError

from ..blocks.interpreters import ProviderSandboxes
from ..blocks.problems import describe_problems
from ..blocks.registry import PROVIDERS, make_unsaved_provider, resolve_provider
from ..blocks.storage.location_parsing import parse_location
from ..sandbox.cancellation import run_shielded
from ..sandbox.errors import ConfigurationError, NotRun, OutcomeUnknown, RlmBatchError, SandboxLost
from ..sandbox.meta import NOTHING_ASKED, Meta, QuerySummary
from ..sandbox.queries.answer_type import AnswerType
from ..sandbox.queries.records import read_answer
from ..sandbox.queries.recursion import QueryContext
from ..sandbox.queries.recursive_model import Conversation, RecursionSettings
from ..sandbox.result import Failure, Outcome, Result
from ..sandbox.sessions.async_interpreter import AsyncInterpreter
from ..sandbox.wire.context_shape import MAX_INLINE_CHARACTERS, describe_context
from ..sandbox.wire.images import build_image_url
from ..sandbox.wire.strict_json import NotJsonError
from .host_tools import load_tools
from .ledger.conversation_ledger import ConversationLedger

if TYPE_CHECKING:
    from ..blocks.language_model.settings import LanguageModelSettings
    from ..blocks.provider import SandboxProvider
    from ..blocks.storage.location import PathOrLocation
    from ..sandbox.interpreter import Interpreter
    from ..sandbox.queries.budget import Usage
    from ..sandbox.queries.records import RlmEvent
    from ..sandbox.queries.recursion import Queries
    from ..sandbox.queries.session import QuerySession

# Code that copies a text from the volume to a file, because later processes of the model read their context there.
COPY_FROM_VOLUME = """
text = load_from_volume(path, binary=False)
with open(file, "w", encoding="utf-8", errors="surrogatepass", newline="") as copy:
    copy.write(text)
SUBMIT(size=len(text), preview=text[:1000])
"""


@dataclass(frozen=True, slots=True)
class _VolumeText:
    """A context that is a text on the provider's volume."""

    path: str


@dataclass(frozen=True, slots=True)
class SessionAnswer:
    """An answer in a conversation. It prints as its text.

    Attributes:
        value: The answer as the model submitted it: a text or another JSON value, or a value of `output_type`.
        text: The answer as text. Without an answer, the output of the last turn that printed something.
        trajectory: A dict with reasoning, code and output for each turn.
        queries: Number, tokens and cost of the queries for this question, and all queries as a tree.
        answered: False if there is no answer.
        error: Without an answer, the error that `ask` raised; None if the question was cancelled.
    """

    value: Any
    text: str
    trajectory: list[dict[str, Any]]
    queries: QuerySummary
    answered: bool = True
    error: RlmBatchError | None = None

    def __str__(self) -> str:
        return self.text


class RlmSession:
    """A recursive language model whose Python names and messages persist from question to question.

    `open_rlm` makes it. Use it as an async context manager, or call `start`, `ask` and `shutdown`, on one event loop.

    Args:
        provider: The provider of the sandbox, or its name.
        settings: The limits, instructions and answer type of the model.
        context: What the questions are about, or None. `open_rlm` marks a path on the volume.
        timeout: Seconds for each question; None for no limit.
        keywords: Keywords of the interpreter, such as `language_model` and `tools`.
        results_path: The directory or location of the conversation's ledger; None for no ledger.

    Attributes:
        answers: The answer to each question so far, also to those that failed.
    """

    def __init__(
        self,
        provider: SandboxProvider | str,
        settings: RecursionSettings,
        context: Any,
        timeout: float | None,
        keywords: dict[str, Any],
        results_path: PathOrLocation | None = None,
    ) -> None:
        keywords["tools"] = load_tools(keywords.get("tools") or {}, None, taken=("context", "history"))
        self.answers: list[SessionAnswer] = []
        self._question_count = 0
        self._results_path = results_path
        self._ledger: ConversationLedger | None = None  # None without a path, and before `start`
        self._provider = provider
        self._settings = settings
        self._timeout = timeout
        self._keywords = keywords
        self._lock = asyncio.Lock()  # One question at a time.
        self._is_shut_down = False
        self._sandbox: _SessionSandbox | None = None
        self._interpreter: Interpreter | None = None
        self._conversation: Conversation | None = None
        self._source = context  # the value of the context, or its `_VolumeText`
        self._context: QueryContext | None = None  # the context in the open sandbox; None before it is there
        unsaved = make_unsaved_provider(provider) if isinstance(provider, str) else provider
        if unsaved is not None:  # Report a wrong keyword at once.
            self._sandbox = _SessionSandbox(unsaved, settings, keywords)

    @property
    def queries(self) -> QuerySummary:
        """Number, tokens and cost of the queries for all questions, without their tree."""
        return sum((answer.queries for answer in self.answers), NOTHING_ASKED)

    async def start(self) -> Self:
        """Open the sandbox, if it is not open.

        Returns:
            The session itself.

        Raises:
            SandboxStartError: The sandbox could not start.
            QuotaExceeded: The provider's quota is exhausted.
            PrepareError: The `prepare` code failed.
            ConfigurationError: The configuration is wrong, or the session belongs to another event loop.
        """
        self._is_shut_down = False
        try:
            await self._open()
        except BaseException:
            await self.shutdown()  # `__aexit__` is not called, and the ledger is locked.
            raise
        return self

    async def ask(
        self,
        query: str,
        *,
        context: Any = None,
        context_volume_path: str | None = None,
        timeout: float | None = None,
    ) -> SessionAnswer:
        """Ask a question and return the answer. Questions that are asked at the same time wait for each other.

        After an error the session stays open: the model keeps its names and messages. `answers[-1]` has the turns and
        the costs of the question.

        Args:
            query: The question.
            context: The new value of the code's variable `context`, as for `open_rlm`. Default: the last one.
            context_volume_path: Path of a text on the provider's volume, instead of `context`. Default: none.
            timeout: Seconds for the question. Default: the session's `timeout`.

        Returns:
            The answer with its turns and costs.

        Raises:
            QueryError: The model gave no answer.
            BudgetExceeded: A limit on calls, tokens or cost is used up.
            DeadlineExceeded: The time has run out.
            OSError: The ledger cannot be written.
            SandboxLost: The sandbox was lost. The next question opens a new one and continues the conversation.
            ConfigurationError: The context is not JSON, or its file cannot be read.
            RlmBatchError: An error of `start`.
        """
        async with self._lock:
            if self._is_shut_down:
                raise ConfigurationError("the session is shut down: open another one with open_rlm")
            source = _read_source(context, context_volume_path)
            try:
                return await self._ask(query, source, timeout)
            except (SandboxLost, OutcomeUnknown) as error:
                raise SandboxLost(
                    f"{error.summary}. The names of the model's code are lost. Ask again: the session opens a new "
                    "sandbox and continues the conversation"
                ) from error

    async def shutdown(self) -> None:
        """Delete the sandbox, even while a question is asked. A second call does nothing."""
        self._is_shut_down = True
        try:
            if self._sandbox is not None:
                await self._sandbox.shutdown()
        finally:
            ledger, self._ledger = self._ledger, None
            if ledger is not None:
                await run_shielded(asyncio.to_thread(ledger.close))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def _open(self) -> tuple[Interpreter, Conversation, _SessionSandbox]:
        """Return the open sandbox, its interpreter and the conversation. Open another sandbox if it is lost."""
        if self._sandbox is None:
            self._sandbox = _SessionSandbox(await resolve_provider(self._provider), self._settings, self._keywords)
        sandbox = self._sandbox
        if self._results_path is not None and self._ledger is None:
            ledger = await asyncio.to_thread(ConversationLedger, self._results_path, sandbox.entry.name)
            self._ledger = sandbox.ledger = ledger
            self.answers = [self._read_answer(outcome) for outcome in ledger.outcomes]
            self._question_count = ledger.question_count
            self._conversation = None
        if self._interpreter is not None and not self._interpreter.is_alive:
            await sandbox.shutdown()
        interpreter = await sandbox.open()
        if self._conversation is None and self._ledger is not None:
            sandbox.set_spent(self._ledger.usage)
            self._conversation = Conversation(interpreter, self._settings, self._ledger.state, self._ledger.save_state)
        elif self._conversation is None:
            self._conversation = Conversation(interpreter, self._settings)
        elif interpreter is not self._interpreter:
            self._conversation.move_to(interpreter)
            self._context = None
        self._interpreter = interpreter
        return interpreter, self._conversation, sandbox

    async def _ask(self, query: str, new_source: Any, timeout: float | None) -> SessionAnswer:
        """Ask a question about a new context. If `new_source` is None, ask about the last context."""
        interpreter, conversation, sandbox = await self._open()
        if new_source is not None or self._context is None:
            source = self._source if new_source is None else new_source
            self._context = await self._load_context(interpreter, sandbox, source)
            self._source = source
        index = self._question_count
        queries = sandbox.make_queries(interpreter, index)
        session = queries.session
        if sandbox.ledger is not None:
            shares = session.cache is not None  # with `cache_queries`
            session.cache = sandbox.ledger.begin_question(index, query, lambda: session.budget.usage, shares=shares)
        session.set_deadline(self._timeout if timeout is None else timeout)
        answer: str | RlmBatchError = NotRun("the question was cancelled")  # the answer's text, or the error
        try:
            answer, _ = await queries.ask(query, self._context, conversation.answer)
        except RlmBatchError as error:
            answer = error
        finally:
            self._add_answer(sandbox, session, query, answer)
        if session.listener_error is not None:  # The listener's own error says more.
            raise session.listener_error
        if isinstance(answer, RlmBatchError):
            raise answer
        return self.answers[-1]

    def _add_answer(
        self, sandbox: _SessionSandbox, session: QuerySession, query: str, answer: str | RlmBatchError
    ) -> None:
        """Add the answer to a question, or its error, to `answers` and to the ledger."""
        meta = Meta(
            index=self._question_count,
            variables={"query": query},
            provider=sandbox.entry.name,
            submitted=isinstance(answer, str),
            queries=session.summarize(),
            seconds=session.queries[0].seconds,
            ended_at=time.time(),
        )
        outcome = Result({"answer": answer}, meta) if isinstance(answer, str) else Failure(answer, meta)
        self.answers.append(self._read_answer(outcome))
        self._question_count += 1
        if sandbox.ledger is not None:
            sandbox.ledger.write_outcome(outcome)

    def _read_answer(self, outcome: Outcome) -> SessionAnswer:
        """Return the answer in the outcome of a question."""
        text, value, trajectory = read_answer(outcome, self._settings.answer_type)
        is_answered = isinstance(outcome, Result)
        error = None if is_answered or isinstance(outcome.error, NotRun) else outcome.error
        return SessionAnswer(value, text, trajectory, outcome.meta.queries, is_answered, error)

    async def _load_context(self, interpreter: Interpreter, sandbox: _SessionSandbox, source: Any) -> QueryContext:
        """Bring a context to the sandbox. Raises ConfigurationError, VolumeError, SandboxLost and CodeError."""
        if source is None:
            return QueryContext()
        file = f"context-{uuid.uuid4().hex[:12]}"
        if isinstance(source, _VolumeText):
            result = await interpreter.execute(COPY_FROM_VOLUME, {"path": source.path, "file": file})
            return QueryContext(path=file, shape=f"a str of {result['size']:,} characters", preview=result["preview"])
        text, description = await asyncio.to_thread(_read_context, source)
        if len(text) <= MAX_INLINE_CHARACTERS:
            return QueryContext(text, **description)
        await sandbox.upload(file, text.encode("utf-8", "surrogatepass"))
        return QueryContext(path=file, **description)


class _SessionSandbox(ProviderSandboxes, AsyncInterpreter):
    """The sandbox and the model of a session."""

    is_recursive = True
    ledger: ConversationLedger | None = None  # gets the turns, also if the session is shut down meanwhile

    def __init__(self, provider: SandboxProvider, settings: RecursionSettings, keywords: dict[str, Any]) -> None:
        self.entry = PROVIDERS[provider.provider_name]
        names = provider.model_fields_set.union(provider.account_settings) - {"credentials"}
        fields = {name: provider.get_account_setting(name) for name in names}
        super().__init__(timeout=None, **keywords, **fields)
        self._limits["recursion"] = settings

    async def open(self) -> Interpreter:
        return await self._start()

    def _pass_turn(self, event: RlmEvent) -> None:
        if self.ledger is not None:
            self.ledger.write_event(event)
        super()._pass_turn(event)

    def set_spent(self, usage: Usage) -> None:
        """Count the usage of earlier processes in the limits of the session."""
        assert self._model_access is not None  # `open` sets it.
        self._model_access.spent.usage = usage

    def make_queries(self, interpreter: Interpreter, index: int) -> Queries:
        """Return the query functions of question number `index`."""
        assert self._model_access is not None  # `open` sets it.
        return self._model_access.queries(interpreter, index=index, on_event=self._pass_turn)


def open_rlm(
    language_model: LanguageModelSettings | str,
    provider: SandboxProvider | str = "local",
    *,
    context: Any = None,
    context_volume_path: str | None = None,
    sub_model: LanguageModelSettings | str | None = None,
    instructions: str = "",
    system_prompt: str = "",
    output_type: Any = None,
    max_turns: int = 20,
    max_errors: int | None = None,
    on_depth: Literal["error", "plain"] = "error",
    compact_tokens: int | None = None,
    turn_timeout: float | None = 60.0,
    timeout: float | None = 600.0,
    results_path: str | PathLike[str] | None = None,
    **keywords: Any,
) -> RlmSession:
    """Return a conversation with a recursive language model, as an async context manager.

    Args:
        language_model: The model: a `LanguageModel`, the name of a saved one, or a model in LiteLLM's naming.
        provider: A provider's block, or its name, such as "local", "container", "local:none" or
            "rlm-daytona-sandbox/NAME". Default: "local".
        context: What the questions are about, the variable `context` of the model's code: a text, a list, a dict, or
            the `pathlib.Path` of a text file. A list of paths becomes a dict of names and texts. Default: none.
        context_volume_path: Path of a text on the provider's volume, instead of `context`. Default: none.
        sub_model: The model for `llm_query`, named as `language_model`. Default: that of `language_model`.
        instructions: Text to add to the model's instructions. Default: none.
        system_prompt: Text that replaces the model's instructions. Default: the built-in text.
        output_type: Type of the answers, as for `rlm`. Default: any JSON value.
        max_turns: Turns for each question. Default: 20.
        max_errors: Failed turns in a row at which a question ends. Default: no limit.
        on_depth: "plain" asks the model without Python beyond `max_depth`; "error" raises DepthExceeded in the code.
            Default: "error".
        compact_tokens: Tokens of a prompt from which the model summarizes the conversation so far. Default: never.
        turn_timeout: Seconds that the code of a turn may work; None for no limit. Seconds in which it waits for queries
            and tools do not count. Code that takes longer is interrupted, and its names are kept. Default: 60.
        timeout: Seconds for each question; None for no limit. Default: 600.
        results_path: Directory or location of the conversation's ledger. A later process with the same path continues
            the conversation: it has the messages and the answers, but not the names of the model's code. Default: no
            ledger.
        **keywords: The tools, limits, files and preparation of an interpreter, such as `max_cost`. Limits per execution
            hold for each question.

    Returns:
        The session. It opens its sandbox when it is entered.

    Raises:
        ConfigurationError: An argument has a wrong value.

    Example:
        >>> async with open_rlm("openai/gpt-4o-mini", context=text) as session:
        ...     late = await session.ask("Which orders were late?")
        ...     print(await session.ask("How many of them were large?"))
    """
    try:
        settings = RecursionSettings(
            max_turns=max_turns,
            max_errors=max_errors,
            instructions=instructions,
            system_prompt=system_prompt,
            answer_type=None if output_type is None else AnswerType.read(output_type),
            on_depth=on_depth,
            compact_tokens=compact_tokens,
            turn_timeout=turn_timeout,
        )
    except ValidationError as error:
        raise ConfigurationError(describe_problems(error)) from None
    if results_path == "":
        raise ConfigurationError("results_path is empty: give the path of a directory, or a location")
    ledger = None if results_path is None else parse_location(results_path)
    source = _read_source(context, context_volume_path)
    keywords |= {"language_model": language_model, "sub_model": sub_model}
    return RlmSession(provider, settings, source, timeout, keywords, ledger)


def _read_source(context: Any, volume_path: str | None) -> Any:
    """Return the context, or the text at the path on the volume. Raises ConfigurationError if both are given."""
    if volume_path is None:
        return context
    if context is not None:
        raise ConfigurationError("the context is given twice: pass only one of context and context_volume_path")
    return _VolumeText(volume_path)


def _read_context(context: Any) -> tuple[str, dict[str, Any]]:
    """Return a context as text, with its description. Raises ConfigurationError."""
    if isinstance(context, list) and context and all(isinstance(item, Path) for item in cast("list[Any]", context)):
        context = {str(path): path for path in cast("list[Path]", context)}
    try:
        if isinstance(context, dict):
            context = {name: _read_path(item) for name, item in cast("dict[Any, Any]", context).items()}
        return describe_context(_read_path(context))
    except NotJsonError as error:
        raise ConfigurationError(str(error)) from None
    except OSError as error:
        raise ConfigurationError(f"the context {error.filename} cannot be read: {error.strerror}") from None


def _read_path(item: Any) -> Any:
    """Return the text of a file if the item is its path, and any other item unchanged. Raises OSError.

    The text of an image is its data URL.
    """
    if not isinstance(item, Path):
        return item
    content = item.expanduser().read_bytes()
    return build_image_url(content) or content.decode("utf-8", "replace")
