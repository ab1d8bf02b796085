"""What a flow run shows in Prefect's UI beside its task runs: a progress artifact, and a report at its end.

An artifact costs some 10 to 25 ms, so there are two for a flow run and none for an execution; the progress is written
once a second at most, and not at all in a run that is shorter. No run fails for want of one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, aupdate_progress_artifact

from ...sandbox.result import Outcome
from ...tasks.ledger.run_record import RunRecord
from ..reporting.markdown import render_markdown
from ..reporting.report import build_report
from ..reporting.summary import RunSummary

INTERVAL = 1.0  # seconds between two looks at the progress
PATIENCE = 20.0  # seconds for the server to take an artifact


class Told:
    """The artifacts of one flow run, an async context manager, which is told each outcome as it comes."""

    def __init__(self, record: RunRecord, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._record = record
        self._tally = RunSummary(record.report_spec)
        self._log = log
        self._key = re.sub("[^a-z0-9-]+", "-", record.flow.lower()).strip("-") or "run"
        self._shown = 0  # outcomes in the progress that the server has
        self._progress: UUID | None = None
        self._telling: asyncio.Task[None] | None = None
        self._away = False

    def ended(self, outcome: Outcome) -> None:
        """An execution has its outcome."""
        self._tally.add(outcome)

    async def __aenter__(self) -> Told:
        self._telling = asyncio.create_task(self._tell())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._telling is not None
        self._telling.cancel()
        with suppress(asyncio.CancelledError):
            await self._telling
        if kind is not None and issubclass(kind, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
            return  # whoever ended the run does not wait for a page on it; `rlm-batch report` makes one
        if self._progress is not None:
            await self._written(self._show())
        await self._written(self._report())

    async def _tell(self) -> None:
        while not self._away:
            await asyncio.sleep(INTERVAL)
            if self._tally.done != self._shown or self._progress is None:
                await self._written(self._show())

    async def _show(self) -> None:
        self._shown = self._tally.done
        share = 100.0 * self._shown / max(1, self._record.total)
        if self._progress is None:
            self._progress = await acreate_progress_artifact(share, f"{self._key}-progress", self._said())
        else:
            await aupdate_progress_artifact(self._progress, share, self._said())

    def _said(self) -> str:
        tally = self._tally
        failed = tally.done - tally.succeeded
        text = f"{tally.done:,} of {self._record.total:,} {self._record.what}s done, {failed:,} failed"
        return text if tally.best_score is None else f"{text}, the best so far {tally.best_score:.6g}"

    async def _report(self) -> None:
        tally = self._tally
        if tally.done:
            text = render_markdown(build_report(tally, [self._record]))
            about = f"{tally.succeeded:,} of {self._record.total:,} {tally.about.noun}s succeeded"
            await acreate_markdown_artifact(text, f"{self._key}-report", about)

    async def _written(self, work: Coroutine[Any, Any, None]) -> None:
        """Does that, if the server takes artifacts; the first that it did not take is the last."""
        if self._away:
            work.close()
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await work
        except Exception as error:  # noqa: BLE001 - a page about the results is not worth the results
            self._away = True
            said = str(error) or type(error).__name__
            self._log.warning(
                "the run's report could not be written to the Prefect server (%s); `rlm-batch report %s` makes one",
                said.splitlines()[0],
                self._record.results_path,
            )
