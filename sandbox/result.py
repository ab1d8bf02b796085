"""What comes back from an execution: a result, or the failure that stands in its place."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .errors import RlmBatchError, error_from_json, error_to_json
from .meta import Meta, QuerySummary
from .outcomes.text_escape import escape_text
from .wire.nonfinite import replace_nonfinite, restore_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Result:
    """What `SUBMIT` handed back: its fields as items and as attributes.

    All of them are in `outputs`, and what else is known of the execution is in `meta`; only those two names are taken.
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
        if name.startswith("__") or name in ("outputs", "meta"):  # pickling and copying ask before there is anything
            raise AttributeError(name)
        try:
            return self.outputs[name]
        except KeyError:
            raise AttributeError(self._describe_missing(name)) from None

    def _describe_missing(self, name: str) -> str:
        if not self.meta.submitted:
            return f"there is no field {name!r}: the code ended without calling SUBMIT"
        if not self.outputs:
            return f"there is no field {name!r}: SUBMIT was called without any"
        return f"there is no field {name!r}: the code submitted {escape_text(', '.join(self.outputs))}"

    def __contains__(self, name: object) -> bool:
        return name in self.outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __bool__(self) -> bool:
        return True  # a result without fields is a result

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.outputs == other.outputs and self.meta == other.meta

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{escape_text(name)}={value!r}' for name, value in self.outputs.items())})"


class Failure:
    """Stands in the place of a result where an execution failed for good: `error` and `meta`."""

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
# `Result | MaybeNone` is None in cases that its reader knows: no type checker asks for a look before each use.
MaybeNone = Any


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """A result or a failure as a dict of JSON values: `outputs` or `error`, and `meta`.

    Numbers that are not finite are None, and stand by JSON pointer under `nonfinite`: those of the outputs beside them,
    those of the variables in the meta.
    """
    meta = {item.name: getattr(outcome.meta, item.name) for item in fields(Meta)}
    queries = outcome.meta.queries
    meta["queries"] = {i.name: getattr(queries, i.name) for i in fields(QuerySummary)} if queries.asked else None
    meta["variables"], nonfinite = replace_nonfinite(outcome.meta.variables)
    if nonfinite:
        meta["nonfinite"] = nonfinite
    if isinstance(outcome, Result):
        outputs, nonfinite = replace_nonfinite(outcome.outputs)
        return {"outputs": outputs, **({"nonfinite": nonfinite} if nonfinite else {}), "meta": meta}
    return {"error": error_to_json(outcome.error), "meta": meta}


def restore_outcome(data: dict[str, Any]) -> None:
    """Puts what was not finite back into what `outcome_to_json` made. Raises ValueError where it names nothing there.

    Once that is done it has no effect.
    """
    restore_numbers(data.get("outputs"), data.pop("nonfinite", {}))
    restore_numbers(data["meta"].get("variables"), data["meta"].pop("nonfinite", {}))


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """What `outcome_to_json` was given. What a later version knows and this one does not is passed over.

    Raises ValueError where `nonfinite` names what is not there.
    """
    restore_outcome(data)
    values = {item.name: data["meta"][item.name] for item in fields(Meta) if item.name in data["meta"]}
    for name in ("layers", "earlier_errors", "files"):
        values[name] = tuple(values.get(name, ()))
    queries: dict[str, Any] = values.get("queries") or {}
    counts: dict[str, Any] = {item.name: queries[item.name] for item in fields(QuerySummary) if item.name in queries}
    counts["tree"] = tuple(counts.get("tree", ()))
    values["queries"] = QuerySummary(**counts)
    meta = Meta(**values)
    if "error" in data:
        return Failure(error_from_json(data["error"]), meta)
    return Result(data["outputs"], meta)
