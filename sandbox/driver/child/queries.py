"""The functions with which code in a sandbox queries a language model through its host."""

from __future__ import annotations

import os

from ...wire.context_shape import MAX_INLINE_CHARACTERS, describe_context
from ...wire.frames import MAX_CALL_BYTES
from ...wire.names import MAX_PROMPTS, add_article
from ...wire.strict_json import NotJsonError, dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    CallHost = Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None

MAX_PROMPTS_BYTES = MAX_CALL_BYTES - 256 * 1024  # bytes of JSON for prompts per host call; the rest is for a context


class QueryError(RuntimeError):
    """A query that no model answered. For a batch, `results` and `errors` hold the answers and errors by index."""

    def __init__(
        self, message: str, results: dict[int, str] | None = None, errors: dict[int, Exception] | None = None
    ) -> None:
        super().__init__(message)
        self.results = {} if results is None else results
        self.errors = {} if errors is None else errors


class BudgetExceeded(QueryError):
    """A query that would take more calls, tokens or money than are left."""


class DepthExceeded(QueryError):
    """A recursive query that exceeds the maximum depth."""


class DeadlineExceeded(QueryError):
    """A query after the time limit for queries."""


_ERRORS = {kind.__name__: kind for kind in (QueryError, BudgetExceeded, DepthExceeded, DeadlineExceeded)}
for _error in _ERRORS.values():
    _error.__module__ = "builtins"  # the name that code sees in tracebacks


def make_query_names(call_host: CallHost) -> dict[str, Any]:
    """Return the query functions and errors that code finds. Without a model, pass None as `call_host`."""

    def llm_query(prompt: str) -> str:
        """Return a model's answer to the prompt. Raises QueryError."""
        return _ask_one(call_host, "llm_query", prompt)

    def rlm_query(prompt: str, context: Any = None) -> str:
        """Return the answer of a recursive language model, which runs Python.

        Args:
            prompt: Text of the query.
            context: A text or another JSON value that the model's Python finds as `context`.

        Raises:
            QueryError: No model answered.
        """
        return _ask_one(call_host, "rlm_query", prompt, (context,))

    def llm_query_batched(prompts: list[str], concurrency: int | None = None, on_error: str = "raise") -> list[Any]:
        """Return the answers to the prompts, in their order.

        Args:
            prompts: Texts of the queries.
            concurrency: Maximum number of queries at the same time; by default the host's limit.
            on_error: "raise" raises an error if a query fails; "return" puts the errors among the answers.

        Raises:
            QueryError: A query failed, with `on_error="raise"`.
        """
        return _ask_many(call_host, "llm_query_batched", prompts, concurrency, on_error)

    def rlm_query_batched(
        prompts: list[str], concurrency: int | None = None, on_error: str = "raise", context: Any = None
    ) -> list[Any]:
        """Return the answers of recursive language models to the prompts, in their order.

        Args:
            prompts: Texts of the queries.
            concurrency: Maximum number of queries at the same time; by default the host's limit.
            on_error: "raise" raises an error if a query fails; "return" puts the errors among the answers.
            context: A text or another JSON value that each model's Python finds as `context`.

        Raises:
            QueryError: A query failed, with `on_error="raise"`.
        """
        return _ask_many(call_host, "rlm_query_batched", prompts, concurrency, on_error, (context,))

    names: dict[str, Any] = dict(_ERRORS)
    for function in (llm_query, rlm_query, llm_query_batched, rlm_query_batched):
        function.__qualname__ = function.__name__
        names[function.__name__] = function
    return names


def _ask_one(call_host: CallHost, name: str, prompt: str, context: tuple[Any] | None = None) -> str:
    _check_text(name, "the prompt", prompt)
    answer = _ask(call_host, name, [prompt], None, context)[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


def _ask_many(
    call_host: CallHost,
    name: str,
    prompts: list[str],
    concurrency: int | None,
    on_error: str,
    context: tuple[Any] | None = None,
) -> list[Any]:
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):  # type: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}: concurrency is {concurrency!r}: use 1 or more, or None for the default")
    if on_error not in ("raise", "return"):
        raise ValueError(f"{name}: on_error is {on_error!r}: use 'raise' or 'return'")
    if isinstance(prompts, str):
        raise TypeError(f"{name}: prompts is one text: pass a list of texts")
    prompts = list(prompts)
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(
            f"{name} was given {len(prompts):,} prompts, and takes at most {MAX_PROMPTS:,}: split them "
            "over several calls"
        )
    for index, prompt in enumerate(prompts):
        _check_text(name, f"prompts[{index}]", prompt)
    if not prompts:
        return []
    answers = _ask(call_host, name, prompts, concurrency, context)
    errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Exception)}
    if errors and on_error == "raise":
        results = {index: answer for index, answer in enumerate(answers) if index not in errors}
        kinds = {type(error) for error in errors.values()}
        first = min(errors)
        raise (kinds.pop() if len(kinds) == 1 else QueryError)(
            f"{len(errors)} of {len(answers)} queries failed, first number {first}: {errors[first]} -- "
            "this error's .results and .errors have the answers and errors by index; on_error='return' "
            "returns both",
            results,
            errors,
        )
    return answers


def _check_text(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {argument} is {add_article(type(value).__name__)}: pass a text")


def _ask(
    call_host: CallHost, name: str, prompts: list[str], concurrency: int | None, context: tuple[Any] | None
) -> list[Any]:
    """Return answers and unraised errors. `context` is a tuple of one value; functions without a context pass None."""
    if call_host is None:
        raise QueryError(f"{name} needs a model: set language_model (--language-model)")
    options: dict[str, Any] = {"concurrency": concurrency}
    path = None
    try:
        if context is not None:
            options["context"] = _describe_context(name, context[0])
            path = options["context"].get("path")
        replies = [reply for part in _cut(name, prompts) for reply in call_host(name, (part,), options)]
    finally:
        if path is not None:
            try:
                os.unlink(path)
            except OSError:
                pass  # the code may have removed it
    return [_ERRORS[reply["error"]](reply["message"]) if "error" in reply else reply["answer"] for reply in replies]


def _describe_context(name: str, context: Any) -> dict[str, Any]:
    """Describe a context for the host. A long context stays in the sandbox, in a file that the model's code reads.

    Raises TypeError for a value that JSON cannot hold.
    """
    if context is None:
        return {}
    try:
        text, described = describe_context(context)
    except NotJsonError as error:
        raise TypeError(f"{name}: {error}") from None
    if len(text) <= MAX_INLINE_CHARACTERS:
        return {**described, "text": text}
    import tempfile

    fd, path = tempfile.mkstemp(prefix="context-", suffix=".txt")
    with open(fd, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)
    return {**described, "path": path}


def _cut(name: str, prompts: list[str]) -> list[list[str]]:
    """Split the prompts into parts that each fit in one call. Raises ValueError for a prompt that is too long.

    Each part is sent after the previous one has been answered.
    """
    if 6 * sum(map(len, prompts)) + 3 * len(prompts) <= MAX_PROMPTS_BYTES:  # safe for any characters
        return [prompts]
    parts: list[list[str]] = [[]]
    size = 0
    for prompt in prompts:
        length = len(dumps(prompt).encode("utf-8", "replace")) + 1
        if length > MAX_PROMPTS_BYTES:
            raise ValueError(
                f"{name} was given a prompt of {length:,} bytes, and takes at most {MAX_PROMPTS_BYTES:,}: "
                "cut it, or pass its text to rlm_query as context"
            )
        if parts[-1] and size + length > MAX_PROMPTS_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(prompt)
        size += length
    return parts
