"""The functions by which code in a sandbox asks a language model, through its host."""

from __future__ import annotations

import os

from ...wire.names import QUERY_ERROR_NAMES, QUERY_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_INLINE_CHARACTERS = 32 * 1024  # of a query's context that go by the wire; a longer one goes by a file
PREVIEW_CHARACTERS = 1000  # of a context that a model is shown


class QueryError(RuntimeError):
    """No model answered. Of a batch: `results` and `errors` are the answers and the errors by index."""

    __module__ = "builtins"  # tracebacks name it as the code knows it

    def __init__(
        self, message: str, results: dict[int, str] | None = None, errors: dict[int, Exception] | None = None
    ) -> None:
        super().__init__(message)
        self.results = {} if results is None else results
        self.errors = {} if errors is None else errors


class BudgetExceeded(QueryError):
    """The query would take more calls, tokens or money than there are left."""

    __module__ = "builtins"


class DepthExceeded(QueryError):
    """A recursive query below the greatest depth."""

    __module__ = "builtins"


class DeadlineExceeded(QueryError):
    """The time for queries is over."""

    __module__ = "builtins"


_ERRORS: dict[str, type[QueryError]] = dict(
    zip(QUERY_ERROR_NAMES, (QueryError, BudgetExceeded, DepthExceeded, DeadlineExceeded))
)


class Queries:
    """The functions by which code asks its host, which asks a model; `call_host` calls the host's functions."""

    def __init__(self, call_host: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None) -> None:
        self._call_host = call_host

    def make_names(self) -> dict[str, Any]:
        """What the code finds."""
        names: dict[str, Any] = dict(_ERRORS)
        for name in QUERY_NAMES:
            function = getattr(self, "_" + name)

            def query(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            query.__name__ = query.__qualname__ = name
            query.__doc__ = function.__doc__
            names[name] = query
        return names

    def _llm_query(self, prompt: str) -> str:
        """A model's answer to the prompt."""
        return self._ask_one("llm_query", prompt, {})

    def _rlm_query(self, prompt: str, *, context: str = "") -> str:
        """The answer of a recursive language model, which has Python of its own and finds the text as `context`."""
        with QueryContext("rlm_query", context) as query_context:
            return self._ask_one("rlm_query", prompt, {"context": query_context})

    def _llm_query_batched(
        self, prompts: list[str], *, concurrency: int | None = None, on_error: str = "raise"
    ) -> list[Any]:
        """The answers to the prompts, in their order."""
        return self._ask_many("llm_query_batched", prompts, concurrency, on_error, {})

    def _rlm_query_batched(
        self, prompts: list[str], *, concurrency: int | None = None, on_error: str = "raise", context: str = ""
    ) -> list[Any]:
        """The answers of recursive language models to the prompts, in their order."""
        with QueryContext("rlm_query_batched", context) as query_context:
            return self._ask_many("rlm_query_batched", prompts, concurrency, on_error, {"context": query_context})

    def _ask_one(self, name: str, prompt: str, options: dict[str, Any]) -> str:
        if not isinstance(prompt, str):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: the prompt is a {type(prompt).__name__}: it is a text")
        answer = self._ask(name, [prompt], {"concurrency": None, **options})[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask_many(
        self, name: str, prompts: list[str], concurrency: int | None, on_error: str, options: dict[str, Any]
    ) -> list[Any]:
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):  # type: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name}: concurrency is {concurrency!r}: it is 1 or more, or None for the host's own")
        if on_error not in ("raise", "return"):
            raise ValueError(f"{name}: on_error is {on_error!r}: it is 'raise' or 'return'")
        if isinstance(prompts, str):
            raise TypeError(f"{name}: prompts is one text: it is a list of texts")
        prompts = list(prompts)
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):  # type: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name}: prompts[{index}] is a {type(prompt).__name__}: it is a text")
        if not prompts:
            return []
        answers = self._ask(name, prompts, {"concurrency": concurrency, **options})
        errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Exception)}
        if errors and on_error == "raise":
            results = {index: answer for index, answer in enumerate(answers) if index not in errors}
            kinds = {type(error) for error in errors.values()}
            first = min(errors)
            raise (kinds.pop() if len(kinds) == 1 else QueryError)(
                f"{len(errors)} of {len(answers)} queries failed, first number {first}: {errors[first]} -- the answers "
                "are in this error's .results, the errors in its .errors, by index; on_error='return' returns both",
                results,
                errors,
            )
        return answers

    def _ask(self, name: str, prompts: list[str], options: dict[str, Any]) -> list[Any]:
        """Answers, and errors that have not been raised."""
        if self._call_host is None:
            raise QueryError(f"{name} has no model to ask: pass language_model= where the code is run")
        return [
            _ERRORS[reply["error"]](reply["message"]) if "error" in reply else reply["answer"]
            for reply in self._call_host(name, (prompts,), options)
        ]


class QueryContext:
    """A query's context as the host is told of it: the text, or the file in this sandbox that it has been put in.

    A long text need not leave the sandbox: the model's Python that reads it runs here too.
    """

    def __init__(self, name: str, text: str) -> None:
        if not isinstance(text, str):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name}: context is a {type(text).__name__}: it is a text")
        self._text = text
        self._path = ""

    def __enter__(self) -> dict[str, Any]:
        if len(self._text) <= MAX_INLINE_CHARACTERS:
            return {"text": self._text}
        import tempfile

        fd, self._path = tempfile.mkstemp(prefix="context-", suffix=".txt")
        with open(fd, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(self._text)
        preview = self._text[:PREVIEW_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
        return {"path": self._path, "length": len(self._text), "preview": preview}

    def __exit__(self, *_: object) -> None:
        if self._path:
            try:
                os.unlink(self._path)
            except OSError:
                pass  # the code may have removed it
