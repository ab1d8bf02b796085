"""The artifacts of a flow run in Prefect's UI: its progress, and at its end a report and a table.

An artifact costs 10 to 25 ms, so a flow run writes three and an execution writes none. A run updates its progress at
most once a second, and a run of less than a second writes no progress. A run does not fail if an artifact cannot be
written.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Self
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, acreate_table_artifact
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from ...tasks.ledger.run_record import RunRecord
from ...tasks.task_log import Logger
from ..reporting.document import escape_markdown, render_markdown
from ..reporting.report import build_report
from ..reporting.summary import RunSummary

PROGRESS_INTERVAL_SECONDS = 1.0  # seconds between two checks of the progress
MAX_TABLE_RECORDS = 100  # rows of the table: the best trials, or the first executions
PUBLISH_TIMEOUT_SECONDS = 20.0  # seconds that the server may take to store an artifact
CANCELLED_PUBLISH_TIMEOUT_SECONDS = 5.0  # the same for a cancelled run


class ArtifactPublisher:
    """A publisher of one flow run's artifacts: an async context manager that publishes the report at its end."""

    def __init__(self, record: RunRecord, summary: RunSummary, log: Logger) -> None:
        self._record = record
        self._summary = summary
        self._log = log
        self._published_count = 0  # number of outcomes in the last progress that the server took
        self._progress_id: UUID | None = None
        self._task: asyncio.Task[None] | None = None
        self._timeout = PUBLISH_TIMEOUT_SECONDS

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._publish_progress_regularly())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)):
            return  # The process must end now. `rlm-batch report` makes the report later.
        if kind is asyncio.CancelledError:  # The process gets 30 s to end.
            self._timeout = CANCELLED_PUBLISH_TIMEOUT_SECONDS
        if self._progress_id is not None:
            await self._publish(self._publish_progress)
        problem = await self._publish(self._publish_report)
        if problem:
            self._log.warning(
                "the report could not be written to the Prefect server (%s); `rlm-batch report %s` makes one",
                problem,
                self._record.results_path,
            )

    async def _publish_progress_regularly(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_SECONDS)
            if self._summary.done != self._published_count or self._progress_id is None:
                await self._publish(self._publish_progress)  # After a failure the next update tries again.

    async def _read_key(self) -> str:
        """Return the key of the artifacts. All runs of a deployment share one, so Prefect shows them as versions."""
        name = self._record.flow
        context = FlowRunContext.get()
        run = None if context is None else context.flow_run
        if run is not None and run.deployment_id is not None:
            async with get_client() as client:
                deployment = await client.read_deployment(run.deployment_id)
            name = f"{name}-{deployment.name}"
            if not re.fullmatch("[a-z0-9-]*[a-z0-9]", name):  # Another name may be the same without its other letters.
                name = f"{name}-{deployment.id}"
        # Prefect allows only small letters, digits and dashes in keys.
        return re.sub("[^a-z0-9-]+", "-", name.lower()).strip("-") or "run"

    async def _publish_progress(self) -> None:
        done = self._summary.done
        percent = 100.0 * done / max(1, self._record.total)
        text = self._summary.describe(self._record.total)
        if self._progress_id is None:
            self._progress_id = await acreate_progress_artifact(percent, f"{await self._read_key()}-progress", text)
        else:
            # Prefect's own function would also send an event, which the graph of the flow run shows as a dot.
            change = {"data": percent, "description": text}
            async with get_client() as client:
                await client.request("PATCH", "/artifacts/{id}", json=change, path_params={"id": self._progress_id})
        self._published_count = done

    async def _publish_report(self) -> None:
        summary = self._summary
        if not summary.done:
            return
        summary.close_groups()
        ended_record = replace(self._record, ended=self._record.ended or time.time())  # It has no end after an error.
        text = render_markdown(build_report(summary, [ended_record]))
        # Prefect's UI renders descriptions and cells as Markdown, so escape the values in them.
        description = escape_markdown(summary.describe(self._record.total))
        rows = summary.build_records(MAX_TABLE_RECORDS)
        for row in rows:
            for name, value in row.items():
                if isinstance(value, str):
                    row[name] = escape_markdown(value)
        key = await self._read_key()
        await asyncio.gather(
            acreate_markdown_artifact(text, f"{key}-report", description),
            acreate_table_artifact(rows, f"{key}-results", description),
        )

    async def _publish(self, publish_artifact: Callable[[], Awaitable[None]]) -> str:
        """Publish an artifact. Return the reason if that failed, or an empty text."""
        try:
            async with asyncio.timeout(self._timeout):
                await publish_artifact()
        except Exception as error:  # noqa: BLE001 - a missing report must not fail the run
            return (str(error) or type(error).__name__).splitlines()[0]
        return ""
