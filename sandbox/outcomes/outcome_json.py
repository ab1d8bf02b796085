"""Conversion of results and failures to the JSON of a ledger, and back."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ..errors import error_from_json, error_to_json
from ..meta import Meta, QuerySummary
from ..result import Failure, Outcome, Result
from ..wire.nonfinite import replace_nonfinite, restore_numbers

# Types of exceptions in code whose query got no answer from a model.
QUERY_ERRORS = ("QueryError", "BudgetExceeded", "DepthExceeded", "DeadlineExceeded")


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return a result or a failure as a dict of JSON values: `outputs` or `error`, and `meta`.

    Non-finite numbers become None. A dict next to them holds the numbers by JSON pointer: `nonfinite` for the outputs,
    `meta["nonfinite"]` for the variables, `meta["value_nonfinite"]` for the last value and `meta["judged_nonfinite"]`
    for what a check judged.
    """
    meta = {item.name: getattr(outcome.meta, item.name) for item in fields(Meta)}
    meta["reports"] = reports = list[list[Any]]()
    for step, value in outcome.meta.reports:
        reports.append([step, value if math.isfinite(value) else str(value)])
    # Leave out the fields that are empty in most lines.
    for name in ("reports", "pruned", "displays", "tool_calls", "collected", "not_collected", "exited", "is_reduction"):
        if not meta[name]:
            del meta[name]
    optional = ("value", "value_repr", "judged", "group", "repeat", "cpu_seconds", "peak_mib", "kept_until", "ended_at")
    for name in optional:  # Of these fields, empty strings, zero and False have a meaning.
        if meta[name] is None:
            del meta[name]
    for name in ("value", "judged"):
        if name in meta:
            # A dict around the value gives the pointers the name of the field.
            plain, nonfinite = replace_nonfinite({name: meta[name]})
            meta[name] = plain[name]
            if nonfinite:
                meta[f"{name}_nonfinite"] = nonfinite
    queries = outcome.meta.queries
    meta["queries"] = None
    if queries.asked:
        meta["queries"] = {item.name: getattr(queries, item.name) for item in fields(QuerySummary)}
    meta["variables"], nonfinite = replace_nonfinite(outcome.meta.variables)
    if nonfinite:
        meta["nonfinite"] = nonfinite
    if not isinstance(outcome, Result):
        return {"error": error_to_json(outcome.error), "meta": meta}
    outputs, nonfinite = replace_nonfinite(outcome.outputs)
    if nonfinite:
        return {"outputs": outputs, "nonfinite": nonfinite, "meta": meta}
    return {"outputs": outputs, "meta": meta}


def get_status(outcome: Outcome) -> str:
    """Return how an execution ended: "succeeded", "exited", "failed" or "unfinished".

    An "exited" execution called `sys.exit` before SUBMIT. An "unfinished" one failed for a reason outside of its code,
    such as a lost sandbox, so no rate counts it.
    """
    if isinstance(outcome, Result):
        has_exited = outcome.meta.exited and not outcome.meta.submitted
        return "exited" if has_exited else "succeeded"
    queries = outcome.meta.queries
    got_no_answer = queries.failed > queries.unsolved and getattr(outcome.error, "type", "") in QUERY_ERRORS
    if got_no_answer or not outcome.error.is_failure_of_code:
        return "unfinished"
    return "failed"


def restore_outcome(data: dict[str, Any]) -> None:
    """Restore the non-finite numbers in a dict of `outcome_to_json`, in place. A second call has no effect.

    Raises ValueError if `nonfinite` names a missing value, or a report is not a step and a number.
    """
    restore_numbers(data.get("outputs"), data.pop("nonfinite", {}))
    meta = data["meta"]
    restore_numbers(meta.get("variables"), meta.pop("nonfinite", {}))
    restore_numbers(meta, meta.pop("value_nonfinite", {}))
    restore_numbers(meta, meta.pop("judged_nonfinite", {}))
    if "reports" in meta:
        try:
            meta["reports"] = [(int(step), float(value)) for step, value in meta["reports"]]
        except TypeError as error:
            raise ValueError("reports that are no steps and numbers") from error


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """Return the outcome from a dict of `outcome_to_json`. Raises ValueError as `restore_outcome` does."""
    restore_outcome(data)
    values = {item.name: data["meta"][item.name] for item in fields(Meta) if item.name in data["meta"]}
    for name in ("layers", "earlier_errors", "files", "reports", "displays", "collected", "not_collected"):
        values[name] = tuple(values.get(name, ()))
    queries: dict[str, Any] = values.get("queries") or {}
    counts: dict[str, Any] = {item.name: queries[item.name] for item in fields(QuerySummary) if item.name in queries}
    counts["tree"] = tuple(counts.get("tree", ()))
    values["queries"] = QuerySummary(**counts)
    meta = Meta(**values)
    if "error" in data:
        return Failure(error_from_json(data["error"]), meta)
    return Result(data["outputs"], meta)
