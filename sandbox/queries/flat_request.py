"""A call of `llm_query` by untrusted code: its checks, and the messages of a question.

The driver makes the same checks with better messages, but code could evade the driver.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from ..wire.names import MAX_PROMPTS
from ..wire.strict_json import dumps
from .session import Message

MAX_MESSAGES = 1000  # messages of one question, and parts of one message
MAX_SCHEMA_CHARACTERS = 64 * 1024  # characters of a schema as JSON
MAX_SCHEMA_PARTS = 10_000  # parts of a schema after its references are followed, as some clients do

# The host passes on no other URL: a provider's client could fetch it on this machine.
ImageUrl = Annotated[str, Field(pattern="^data:image/")]


class TextPart(TypedDict):
    """A text in a message."""

    type: Literal["text"]
    text: str


class Image(TypedDict):
    """The URL of an image."""

    url: ImageUrl
    detail: NotRequired[Literal["auto", "low", "high"]]


class ImagePart(TypedDict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Image


class PromptMessage(TypedDict):
    """A message of a question."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart | ImagePart], Field(min_length=1, max_length=MAX_MESSAGES)]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema. Raise ValueError if its text is too long, or it has too many parts with its references."""
    if schema.get("type") != "object":
        raise ValueError("it must be a JSON schema of an object")
    if len(dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"it has more than {MAX_SCHEMA_CHARACTERS:,} characters")
    definitions = dict(schema.get("definitions", {})) | dict(schema.get("$defs", {}))
    # Parts to count, each with the names of the definitions around it: a definition in itself is not followed.
    waiting: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
    count = 0
    while waiting:
        count += 1
        if count > MAX_SCHEMA_PARTS:
            raise ValueError(f"it has more than {MAX_SCHEMA_PARTS:,} parts with its references")
        part, followed = waiting.pop()
        if isinstance(part, dict):
            waiting += [(inner, followed) for inner in part.values()]  # type: ignore[reportUnknownVariableType]
            name = str(part.get("$ref")).rpartition("/")[2]  # type: ignore[reportUnknownMemberType]
            if name in definitions and name not in followed:
                waiting.append((definitions[name], followed | {name}))
        elif isinstance(part, list):
            waiting += [(inner, followed) for inner in part]  # type: ignore[reportUnknownVariableType]
    return schema


class FlatRequest(BaseModel):
    """The arguments of one call of `llm_query` or `llm_query_batched`."""

    model_config = ConfigDict(extra="forbid", strict=True)  # The parts above have the same settings.
    prompts: Annotated[
        list[str | Annotated[list[PromptMessage], Field(min_length=1, max_length=MAX_MESSAGES)]],
        Field(max_length=MAX_PROMPTS),
    ]
    concurrency: int | None
    model: str | None = None
    system: str | None = None
    images: list[ImageUrl] | None = None
    temperature: Annotated[int | float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    response_format: Annotated[dict[str, Any], AfterValidator(_check_schema)] | None = None

    @classmethod
    def read(cls, prompts: Any, **options: Any) -> FlatRequest:
        """Return the request with a call's arguments. Raises ValueError with one line about a wrong argument."""
        try:
            return cls(prompts=prompts, **options)
        except ValidationError as error:
            problem = error.errors()[-1]
            raise ValueError(f"{problem['loc'][0]}: {problem['msg']}") from None

    def build_messages(self, prompt: Any) -> list[Message]:
        """Return the messages of one of the prompts. The images go with the last message."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.images:
            content = messages[-1]["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            messages[-1] = {**messages[-1], "content": [*parts, *images]}
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def find_last_text(prompt: Any) -> str:
    """Return the text of a prompt, or of its last message, for records."""
    content: Any = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
