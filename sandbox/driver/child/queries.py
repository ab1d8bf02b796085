"""The functions with which code in a sandbox queries a language model through its host."""

# The values are JSON or types of any kind, which only checks at run time can tell apart.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false

from __future__ import annotations

import os

from ...wire.context_shape import MAX_INLINE_CHARACTERS, describe_context
from ...wire.frames import MAX_CALL_BYTES
from ...wire.images import IMAGE_START, build_image_url
from ...wire.names import MAX_PROMPTS, add_article
from ...wire.strict_json import NotJsonError, dumps
from .answer_format import AnswerFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Prompt = str | list[dict[str, Any]]
    CallHost = Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None

MAX_QUERY_BYTES = MAX_CALL_BYTES - 1024  # JSON of the prompts and options of a host call, without the call's own names
MAX_IMAGE_CHARACTERS = 3 * 1024 * 1024  # characters of the data URLs of a prompt's images
MAX_IMAGE_BYTES = MAX_IMAGE_CHARACTERS // 4 * 3  # bytes of an image
DOWNLOAD_SECONDS = 60.0  # seconds that an image's server may be silent


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


class QueryFunctions:
    """The functions that query a model. Without a model, `call_host` is None and they raise QueryError."""

    def __init__(self, call_host: CallHost) -> None:
        self._call_host = call_host

    def llm_query(
        self,
        prompt: str | None = None,
        model: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        system: str | None = None,
        images: list[Any] | None = None,
        response_format: Any = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> Any:
        """Return a model's answer to the prompt: a text, or a value with a `response_format`.

        Args:
            prompt: Text of the query.
            model: Name of a model that the host allows; by default the host's choice.
            messages: A conversation in OpenAI's form, instead of the prompt.
            system: System message.
            images: Paths, bytes or URLs of images that go with the prompt.
            response_format: JSON schema as a dict, a pydantic model, a dataclass, or a type such as `list[str]`.
            temperature: Sampling temperature.
            max_tokens: Tokens of the answer. The host's limit also holds.

        Raises:
            QueryError: No model answered, or the answer does not fit `response_format`.
        """
        name = "llm_query"
        options, answer_format = _read_options(
            name, response_format, model=model, system=system, images=images, temperature=temperature,
            max_tokens=max_tokens,
        )  # fmt: skip
        argument, value = _choose(name, "prompt", prompt, messages)
        query = _read_prompt(name, argument, value)
        return _get_only(_ask(self._call_host, name, [query], options, answer_format))

    def rlm_query(self, prompt: str, context: Any = None, *, model: str | None = None) -> str:
        """Return the answer of a recursive language model, which runs Python.

        Args:
            prompt: Text of the query.
            context: A text or another JSON value that the model's Python finds as `context`.
            model: Name of a model that the host allows; by default that of this code.

        Raises:
            QueryError: No model answered.
        """
        query = _read_prompt("rlm_query", "prompt", prompt, takes_messages=False)
        return _get_only(_ask(self._call_host, "rlm_query", [query], {"context": context, "model": model}))

    def llm_query_batched(
        self,
        prompts: list[str] | None = None,
        concurrency: int | str | None = None,
        on_error: str = "raise",
        *,
        messages: list[list[dict[str, Any]]] | None = None,
        images: list[Any] | None = None,
        response_format: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Return the answers to the prompts, in their order.

        Args:
            prompts: Texts of the queries.
            concurrency: Maximum number of queries at the same time; by default the host's limit. A text is the model.
            on_error: "raise" raises an error if a query fails; "return" puts the errors among the answers.
            messages: A conversation for each query, instead of the prompts.
            images: Images that go with every prompt, or a list of images for each prompt.
            response_format: As for `llm_query`.
            options: `model`, `system`, `temperature` and `max_tokens` as for `llm_query`, the same for all prompts.

        Raises:
            QueryError: A query failed, with `on_error="raise"`.
        """
        name = "llm_query_batched"
        if isinstance(concurrency, str):  # alexzhang13/rlm has the model there.
            concurrency, options["model"] = None, concurrency
        shared_images, images_of_prompts = images, None
        if images and _are_lists(images):
            shared_images, images_of_prompts = None, images
        options, answer_format = _read_options(name, response_format, images=shared_images, **options)
        argument, values = _choose(name, "prompts", prompts, messages)
        queries = _read_prompts(name, argument, values, images_of_prompts)
        options["concurrency"] = concurrency
        return _ask_all(self._call_host, name, queries, on_error, options, answer_format)

    def rlm_query_batched(
        self,
        prompts: list[str],
        concurrency: int | None = None,
        on_error: str = "raise",
        context: Any = None,
        *,
        model: str | None = None,
    ) -> list[Any]:
        """Return the answers of recursive language models to the prompts, in their order.

        Args:
            prompts: Texts of the queries.
            concurrency: Maximum number of queries at the same time; by default the host's limit.
            on_error: "raise" raises an error if a query fails; "return" puts the errors among the answers.
            context: A text or another JSON value that each model's Python finds as `context`.
            model: As for `rlm_query`.

        Raises:
            QueryError: A query failed, with `on_error="raise"`.
        """
        name = "rlm_query_batched"
        queries = _read_prompts(name, "prompts", prompts, takes_messages=False)
        options = {"concurrency": concurrency, "context": context, "model": model}
        return _ask_all(self._call_host, name, queries, on_error, options)


QUERY_FUNCTIONS = (
    QueryFunctions.llm_query,
    QueryFunctions.rlm_query,
    QueryFunctions.llm_query_batched,
    QueryFunctions.rlm_query_batched,
)
for _function in QUERY_FUNCTIONS:
    _function.__qualname__ = _function.__name__  # the name that code sees in errors


def make_query_names(call_host: CallHost) -> dict[str, Any]:
    """Return the query functions and errors that code finds. Without a model, pass None as `call_host`."""
    names: dict[str, Any] = dict(_ERRORS)
    functions = QueryFunctions(call_host)
    for function in QUERY_FUNCTIONS:
        names[function.__name__] = getattr(functions, function.__name__)
    return names


def _choose(name: str, argument: str, value: Any, messages: Any) -> tuple[str, Any]:
    """Return the name and the value of the argument that is given: `argument`, or "messages"."""
    if value is not None and messages is not None:
        raise TypeError(f"{name}: both {argument} and messages are given: pass one of them")
    return (argument, value) if messages is None else ("messages", messages)


def _read_prompts(
    name: str, argument: str, prompts: Any, images: list[Any] | None = None, *, takes_messages: bool = True
) -> list[Prompt]:
    """Return the prompts of a batch as the host takes them. `images`, if given, has a list for each prompt."""
    if isinstance(prompts, str):
        raise TypeError(f"{name}: {argument} is one text: pass a list of texts")
    prompts = list(prompts)
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(
            f"{name}: {len(prompts):,} prompts are more than {MAX_PROMPTS:,}: split them into several calls"
        )
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"{name}: images has {len(images):,} lists, and there are {len(prompts):,} prompts")
    queries: list[Prompt] = []
    for i, prompt in enumerate(prompts):
        own_images = None if images is None else images[i]
        queries.append(_read_prompt(name, f"{argument}[{i}]", prompt, own_images, takes_messages=takes_messages))
    return queries


def _get_only(answers: list[Any]) -> Any:
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _ask_all(
    call_host: CallHost,
    name: str,
    prompts: list[Prompt],
    on_error: str,
    options: dict[str, Any],
    answer_format: AnswerFormat | None = None,
) -> list[Any]:
    """Return the answers of a batch. Failed queries raise one error, or their errors are among the answers."""
    concurrency = options["concurrency"]
    is_number = isinstance(concurrency, int) and concurrency >= 1
    if concurrency is not None and not is_number:
        raise ValueError(f"{name}: concurrency is {concurrency!r}: use 1 or more, or None for the default")
    if on_error not in ("raise", "return"):
        raise ValueError(f"{name}: on_error is {on_error!r}: use 'raise' or 'return'")
    answers = _ask(call_host, name, prompts, options, answer_format) if prompts else []
    errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Exception)}
    if not errors or on_error == "return":
        return answers
    kinds = {type(error) for error in errors.values()}
    kind: Any = kinds.pop() if len(kinds) == 1 else QueryError
    first = min(errors)
    raise kind(
        f"{len(errors)} of {len(answers)} queries failed, first number {first}: {errors[first]} -- this error's "
        ".results and .errors have the answers and errors by index; on_error='return' returns both",
        {index: answer for index, answer in enumerate(answers) if index not in errors},
        errors,
    )


def _ask(
    call_host: CallHost,
    name: str,
    prompts: list[Prompt],
    options: dict[str, Any],
    answer_format: AnswerFormat | None = None,
) -> list[Any]:
    """Return the host's answers to the prompts; a failed query's answer is its error."""
    if call_host is None:
        raise QueryError(f"{name} needs a model: set `language_model`")
    options = {"concurrency": None, **options}
    path = None
    try:
        if "context" in options:
            options["context"] = _describe_context(name, options["context"])
            path = options["context"].get("path")
        max_bytes = MAX_QUERY_BYTES - _count_bytes(options)
        replies: list[Any] = []
        for part in _split(name, prompts, max_bytes):
            replies += call_host(name, (part,), options)
    finally:
        if path is not None:
            try:
                os.unlink(path)
            except OSError:
                pass  # the code may have removed it
    return [_read_reply(name, reply, answer_format) for reply in replies]


def _read_reply(name: str, reply: dict[str, str], answer_format: AnswerFormat | None) -> Any:
    """Return the reply's answer, or its error as a value: a batch may return both."""
    if "error" in reply:
        return _ERRORS[reply["error"]](reply["message"])
    if answer_format is None:
        return reply["answer"]
    try:
        return answer_format.read(reply["answer"])
    except ValueError as error:
        return QueryError(f"{name}: {error}")


def _describe_context(name: str, context: Any) -> dict[str, Any]:
    """Return the context for the host. A long one becomes a file in the sandbox. Raises TypeError if it is no JSON."""
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


def _count_bytes(value: Any) -> int:
    return len(dumps(value).encode("utf-8", "replace"))


def _split(name: str, prompts: list[Prompt], max_bytes: int) -> list[list[Prompt]]:
    """Split the prompts into parts of at most `max_bytes` of JSON, one for each call.

    Raises ValueError if a prompt is longer.
    """
    parts: list[list[Prompt]] = [[]]
    part_bytes = 0
    for prompt in prompts:
        prompt_bytes = _count_bytes(prompt) + 1
        if prompt_bytes > max_bytes:
            raise ValueError(
                f"{name}: a prompt has {prompt_bytes:,} bytes, more than {max_bytes:,}: cut it, or pass it to "
                "rlm_query as context"
            )
        if part_bytes + prompt_bytes > max_bytes:
            parts.append([])
            part_bytes = 0
        parts[-1].append(prompt)
        part_bytes += prompt_bytes
    return parts


def _read_options(
    name: str, response_format: Any, *, images: Any = None, **options: Any
) -> tuple[dict[str, Any], AnswerFormat | None]:
    """Return the options that are not None, in the form that the host reads, and the format of answers."""
    answer_format = None
    if response_format is not None:
        answer_format = AnswerFormat(response_format)
        options["response_format"] = answer_format.schema
    if images is not None:
        options["images"] = _read_images(name, images)
    set_options = {option: value for option, value in options.items() if value is not None}
    return set_options, answer_format


def _are_lists(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, (list, tuple)) for value in values)


def _read_prompt(name: str, argument: str, prompt: Any, images: Any = None, *, takes_messages: bool = True) -> Prompt:
    """Return a prompt for the host: a text, or a list of messages.

    `argument` names the prompt in errors. Raises TypeError for other types, and the errors of `_read_images`.
    """
    if isinstance(prompt, str):
        if images is None:
            return prompt
        messages: list[Any] = [{"role": "user", "content": prompt}]
    elif takes_messages and isinstance(prompt, (list, tuple)) and prompt:
        messages = [_read_message(name, f"{argument}[{i}]", message) for i, message in enumerate(prompt)]
    else:
        wanted = "text or a list of messages" if takes_messages else "text"
        raise TypeError(f"{name}: {argument} is {add_article(type(prompt).__name__)}: pass a {wanted}")
    if images is not None:
        parts = messages[-1]["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in _read_images(name, images)]
        messages[-1]["content"] = parts
    return messages


def _read_message(name: str, place: str, message: Any) -> dict[str, Any]:
    """Return the role and the content of a message, with images as data URLs. The host checks the rest."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, (str, list)) or "role" not in message:
        raise TypeError(f"{name}: {place} is no message: pass a dict such as {{'role': 'user', 'content': 'text'}}")
    if isinstance(content, list):
        content = [_read_part(name, part) for part in content]
    return {"role": message["role"], "content": content}


def _read_part(name: str, part: Any) -> Any:
    if part["type"] != "image_url":
        return part
    (url,) = _read_images(name, [part["image_url"]["url"]])
    return {"type": "image_url", "image_url": {**part["image_url"], "url": url}}


def _read_images(name: str, images: Any) -> list[str]:
    """Return one or more images as data URLs.

    Raises TypeError for a wrong type, ValueError for a wrong format or size, and OSError if it cannot be read.
    """
    if isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike)):
        images = [images]
    urls = [_read_image(name, image) for image in images]
    if sum(map(len, urls)) > MAX_IMAGE_CHARACTERS:
        raise ValueError(
            f"{name}: the images of a prompt have more than {MAX_IMAGE_BYTES:,} bytes: make them smaller, or spread "
            "them over several prompts"
        )
    return urls


def _read_image(name: str, image: Any) -> str:
    if isinstance(image, str) and image.startswith("data:"):
        if not image.startswith(IMAGE_START):
            raise ValueError(f"{name}: the data URL {image[:30]}... is no image")
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        content, source = bytes(image), "bytes"
    elif isinstance(image, (str, os.PathLike)):
        source = os.fspath(image)
        with _open_image(source) as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    else:
        raise TypeError(f"{name}: an image is {add_article(type(image).__name__)}: pass a path, bytes or a URL")
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(f"{name}: the image {source} has more than {MAX_IMAGE_BYTES:,} bytes: make it smaller")
    url = build_image_url(content)
    if not url:
        raise ValueError(f"{name}: the image {source} is not PNG, JPEG, GIF or WebP: convert it")
    return url


def _open_image(source: Any) -> Any:
    """Open a file or a web address. The sandbox downloads it, so its limits on the network hold."""
    if not str(source).startswith(("http://", "https://")):
        return open(source, "rb")
    import urllib.request

    return urllib.request.urlopen(source, timeout=DOWNLOAD_SECONDS)
