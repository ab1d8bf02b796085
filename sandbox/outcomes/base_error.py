"""The base class of all rlm-batch errors. It is not in `errors`: that uses `result`, which uses this class."""

from typing import Any, ClassVar, Literal

from ..meta import Meta
from .text_escape import LINE_CHARACTERS, escape_text

MAX_SUMMARY_CHARACTERS = 500  # one line of a table or a log

RetryRule = Literal["never", "if asked", "if idempotent", "always"]


class RlmBatchError(Exception):
    """The base class of all rlm-batch errors: a text, and attributes that a subclass declares.

    `str()` escapes characters that a terminal would interpret; `text` is the original text. `meta` describes the failed
    execution (its output, its sandbox, its seconds), or has the value None without an execution.

    Args:
        text: The message.
        **attributes: Values of the attributes that the class declares.
    """

    retry_rule: ClassVar[RetryRule] = "never"
    details: ClassVar[tuple[str, ...]] = ()  # attributes that the JSON contains besides the text
    _kinds: ClassVar[dict[str, type["RlmBatchError"]]] = {}  # all subclasses, by name

    def __init__(self, text: str, **attributes: Any) -> None:
        super().__init__(text)
        self.meta: Meta | None = None
        for name, value in attributes.items():
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            setattr(self, name, value)

    def __init_subclass__(cls) -> None:
        cls._kinds[cls.__name__] = cls

    @property
    def text(self) -> str:
        """Return the original text. It may contain control characters that code put there."""
        return super().__str__()

    def __str__(self) -> str:
        return escape_text(self.text, keep=LINE_CHARACTERS)

    @property
    def summary(self) -> str:
        """Return the first line of the text, escaped and cut to the length that a table or a log shows."""
        line = self.text.partition("\n")[0]
        shown = line if len(line) <= MAX_SUMMARY_CHARACTERS else f"{line[:MAX_SUMMARY_CHARACTERS]}..."
        return escape_text(shown, keep="\t")
