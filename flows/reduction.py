"""The reduction of a run: code that runs once in a sandbox, over the results of all executions."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..sandbox.errors import ConfigurationError
from ..sandbox.requests.execution_request import EncodedVariable, encode_variable
from ..sandbox.result import Outcome, Result
from ..sandbox.wire.strict_json import NotJsonError
from ..tasks.check import describe_error
from ..tasks.execution import Execution, add_index, compute_key

if TYPE_CHECKING:
    from .engine.run import Run


async def summarize_outcomes(run: "Run", code: str) -> None:
    """Execute the code of `summarize`, also if executions failed. Its variable `results` has a dict for each one."""
    rows = await asyncio.to_thread(_list_rows, run.store.outcomes)
    await execute_reduction(run, code, rows, await run.compute_fingerprint())


async def execute_reduction(
    run: "Run", code: str, results: Any, fingerprint: dict[str, Any], skipped: str = ""
) -> None:
    """Execute code once with the variable `results`, or only record that it did not run if `skipped` has a reason."""
    number = run.plan.total
    encoded = {"results": await asyncio.to_thread(encode_json, results, "the submitted fields")}
    key = compute_key(code, {}, encoded, add_index(fingerprint, number))
    reduction = Execution(number, code, {}, key, encoded, is_reduction=True)
    if skipped:
        run.skip([reduction], skipped)
    else:
        await run.executor.execute_all(iter([reduction]), run.cache.find_result)


def _list_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the variables of each outcome with its fields, or with its `error` as a check finds it."""
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        fields = outcome.outputs if isinstance(outcome, Result) else {"error": describe_error(outcome.error)}
        rows.append({**outcome.meta.variables, **fields})
    return rows


def encode_json(value: Any, description: str) -> EncodedVariable:
    """Return a value as a variable. Raises ConfigurationError with the description if it is not JSON."""
    try:
        return encode_variable(value)
    except NotJsonError as error:
        raise ConfigurationError(f"{description} is not JSON: {error}") from None
