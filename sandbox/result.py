"""The outcome of an execution: a result or a failure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .outcomes.text_escape import escape_text, render_result

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView

    from .errors import RlmBatchError
    from .meta import Meta


class Result:
    """The fields that the code submitted, available as items and as attributes.

    `dict(result)` and `**result` give the fields. Only the names `outputs` and `meta` are reserved. If a field is
    called `keys`, use `dict(result.outputs)`: the field hides the method.

    Attributes:
        outputs: The submitted fields by name.
        meta: The execution's metadata.
    """

    __slots__ = ("meta", "outputs")

    def __init__(self, outputs: dict[str, Any], meta: Meta) -> None:
        self.outputs = outputs
        self.meta = meta

    def __getitem__(self, name: str) -> Any:
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(self._describe_missing(name)) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("outputs", "meta"):  # Pickle and copy look these up before they are set.
            raise AttributeError(name)
        try:
            return self.outputs[name]
        except KeyError:
            if name == "keys":  # `dict(result)` calls it. A method would hide a field of that name.
                return self.outputs.keys
            if name == "_repr_html_":  # Notebooks call it.
                return partial(render_result, self.outputs, self.meta.displays)
            raise AttributeError(self._describe_missing(name)) from None

    if TYPE_CHECKING:

        def keys(self) -> KeysView[str]: ...

    def _describe_missing(self, name: str) -> str:
        if self.meta.pruned:
            return f"no field {name!r}: the code was pruned before SUBMIT"
        if not self.meta.submitted:
            end = "called sys.exit" if self.meta.exited else "ended"
            return f"no field {name!r}: the code {end} before SUBMIT"
        if not self.outputs:
            return f"no field {name!r}: SUBMIT was called without fields"
        return f"no field {name!r}: the code submitted {escape_text(', '.join(self.outputs))}"

    def __contains__(self, name: object) -> bool:
        return name in self.outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __bool__(self) -> bool:
        return True  # A result without fields is true, too.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.outputs == other.outputs and self.meta == other.meta

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = [f"{escape_text(name)}={value!r}" for name, value in self.outputs.items()]
        return f"Result({', '.join(fields)})"


class Failure:
    """The failure of an execution, in the list of results.

    Attributes:
        error: The error of the last attempt.
        meta: The execution's metadata.
    """

    __slots__ = ("error", "meta")

    def __init__(self, error: RlmBatchError, meta: Meta) -> None:
        self.error = error
        self.meta = meta

    def __getitem__(self, name: str) -> Any:
        raise KeyError(self._describe_missing(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("error", "meta"):
            raise AttributeError(name)
        raise AttributeError(self._describe_missing(name))

    def _describe_missing(self, name: str) -> str:
        return f"there is no field {name!r}: this execution failed: {self.error.summary}"

    def __repr__(self) -> str:
        return f"Failure({type(self.error).__name__}: {self.error.summary})"


Outcome = Result | Failure
# In `Result | MaybeNone`, None is possible, but type checkers require no check before each use.
MaybeNone = Any
