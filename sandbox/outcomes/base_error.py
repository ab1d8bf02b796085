"""What all our errors have in common, apart from them, for what an error has may be a result."""

from typing import Any, ClassVar, Literal

from ..meta import Meta
from .text_escape import LINE_CHARACTERS, escape_text

MAX_SUMMARY_CHARACTERS = 500  # a line of a table or a log

RetryRule = Literal["never", "if asked", "if idempotent", "always"]


class RlmBatchError(Exception):
    """What all our errors have in common: a text, and by keyword the attributes that a class has beside it.

    Printed, or uncaught, it is the text without what a terminal would take for commands; `text` is the text as it is.
    `meta` is what is known of the execution that failed (its output, its sandbox, its seconds), or None where there
    was none.
    """

    retry_rule: ClassVar[RetryRule] = "never"
    details: ClassVar[tuple[str, ...]] = ()  # the attributes that stand in the JSON beside the text
    _kinds: ClassVar[dict[str, type["RlmBatchError"]]] = {}  # all of ours, by name

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
        """The text as it is, with whatever letters code has put into it."""
        return super().__str__()

    def __str__(self) -> str:
        return escape_text(self.text, keep=LINE_CHARACTERS)

    @property
    def summary(self) -> str:
        """The first line of the text, or as much of it as a table or a log shows."""
        line = self.text.partition("\n")[0]
        shown = line if len(line) <= MAX_SUMMARY_CHARACTERS else f"{line[:MAX_SUMMARY_CHARACTERS]}..."
        return escape_text(shown, keep="\t")
