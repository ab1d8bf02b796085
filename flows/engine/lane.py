"""A lane: one of a flow run's workers, with at most one sandbox open at a time."""

import asyncio
import errno
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from ...sandbox.driver_settings import KEEP_SECONDS
from ...sandbox.errors import (
    ConfigurationError,
    PrepareError,
    QuotaExceeded,
    RlmBatchError,
    SandboxLost,
    StateLost,
    VolumeError,
)
from ...sandbox.interpreter import Interpreter
from ...sandbox.meta import Meta
from ...sandbox.queries.answer_cache import AnswerCache
from ...sandbox.queries.recursion import Queries
from ...sandbox.queries.transcript import Transcript
from ...sandbox.requests.execution_request import ExecutionRequest
from ...sandbox.result import Result
from ...tasks.capacity.admission import REFUSAL_PATIENCE_SECONDS, Permit
from ...tasks.capacity.slots import Slot, Slots
from ...tasks.check import ARCHIVE_NAME, UNPACK, build_archive, combine, explain
from ...tasks.execution import Execution, build_pruned_result
from ...tasks.host_tools import Tool
from ...tasks.kept_sandboxes import build_input_files
from ...tasks.ledger.collected_files import open_temporary_folder
from ...tasks.task_log import OutputLog
from ...tasks.tracing import trace_execution
from .run import Run

ALL_FILES = ["**"]  # the files that a check gets if `collect` names none


class ProviderUnusable(Exception):
    """The provider says that its configuration is wrong. The cause of this error is the provider's error.

    It ends a flow run that has never had a sandbox. A flow run that has had a sandbox only starts no more executions.
    """


class Lane:
    """A lane: runs executions one after another, each in its own process, in at most one sandbox.

    `acquire` waits for one of the `slots` and then for a permit. The lane opens sandboxes until `release`. A reused
    sandbox is replaced if it is lost, or if its remaining lifetime is too short for an execution. With a
    `state_context` the sandbox is never replaced. If it is lost, the state is lost too, and every later execution
    raises StateLost.
    """

    def __init__(self, run: Run, slots: Slots) -> None:
        self.run = run
        self._slots = slots
        self._slot: Slot | None = None
        self._permit: Permit | None = None  # The permit of the open sandbox, or of the next one.
        self._opening: Permit | None = None  # The permit of a starting sandbox.
        self._tools = {name: self._count_calls(name, tool) for name, tool in run.tools.items()}
        self._tool_calls: Counter[str] = Counter()  # Calls in the current execution.
        self._prepare_log: OutputLog | None = None
        self._has_state = False
        self._interpreter: Interpreter | None = None
        self._uploaded = set[str]()  # paths of files that the open sandbox has for all executions
        self._own_files = set[str]()  # paths of files that it has for one execution
        self._expires_at = 0.0
        # Epoch seconds until which the open sandbox is kept after its end here, and the failed execution's number.
        self._kept: tuple[float, int] | None = None
        self._opened_at: float | None = None  # the event loop's time when the open sandbox was requested
        self._check_lane = None if run.check is None else CheckLane(run, slots)

    async def acquire(self, *, has_work: bool = False) -> bool:
        """Wait for a slot and a permit, unless the lane has them. Return False if no work is left for the lane."""
        if self._slot is None:
            self._slot = await self._slots.acquire()
        if self._slot is not None and self._permit is None:
            self._permit = await self._slots.admission.acquire(is_urgent=has_work)
        return self._permit is not None

    async def acquire_for_work(self) -> None:
        """Wait for a slot and a permit, unless the lane has them. Wait even if other lanes found no more work.

        Raises ProviderUnusable if this run opens no more sandboxes.
        """
        while self._permit is None:
            if (error := self._slots.admission.error) is not None:
                raise ProviderUnusable from error
            await self.acquire(has_work=True)

    async def release_if_wanted(self) -> None:
        """Give up the slot and the sandbox between two executions, if other runs have waited long enough."""
        if self._slot is not None and not self._has_state and await self._slots.should_hand_over(self._slot):
            await self.release()

    async def acquire_now(self) -> bool:
        """Take a slot and a permit if they are free now, unless the lane has them. Return whether the lane has both."""
        if self._slot is None:
            self._slot = await self._slots.acquire_now()
        if self._slot is not None and self._permit is None:
            self._permit = self._slots.admission.acquire_now()
        if self._permit is None:
            await self.release()
        return self._permit is not None

    async def release(self) -> None:
        """Remove the sandbox, if one is open, and give back the slot and the permit."""
        try:
            if self._check_lane is not None:
                await self._check_lane.release()
        finally:
            try:
                await self.close_sandbox()
            finally:
                slot, self._slot = self._slot, None
                if slot is not None:
                    await self._slots.release(slot)

    async def execute(
        self,
        execution: Execution,
        on_output: Callable[[str, str], None] | None = None,
    ) -> Result:
        """Return the result of one attempt at an execution. The flow run may keep the sandbox of one that failed.

        Raises the errors of `Interpreter.run`, with complete `meta`. Raises ProviderUnusable if the provider says
        that its configuration is wrong.
        """
        with trace_execution(execution, self.run.provider.provider_name) as set_meta:
            result = await self._execute(execution, on_output)
            set_meta(result.meta)
            return result

    def has_check(self, execution: Execution) -> bool:
        """Return whether a check judges the execution."""
        return self._check_lane is not None and execution.is_checked

    async def check(self, execution: Execution) -> Result:
        """Run the check of an execution that has ended, and return the execution's result: the check's fields.

        The check runs in another sandbox than any execution. With reused sandboxes the lane keeps both, if a second
        slot and permit are free now. Otherwise the execution's sandbox is removed first, and its slot serves the check.
        So lanes never wait for each other's second sandbox.

        Raises:
            CheckError: The check failed.
            RlmBatchError: The check's sandbox failed. A retry runs only the check.
            ProviderUnusable: The provider says that its configuration is wrong.
        """
        lane, check, ended = self._check_lane, self.run.check, execution.ended
        assert lane is not None
        assert check is not None
        assert ended is not None
        try:
            request = await asyncio.to_thread(check.build_execution, execution, ended)
            result = await self._check_beside(lane, request) if self.run.options.reuse_sandboxes else None
            if result is None:
                async with self._lend_slot(lane):
                    result = await lane.execute(request)
        except RlmBatchError as error:
            explained = explain(error, execution, ended)
            raise explained from (None if explained is error else error)
        return combine(execution, ended, result)

    async def _check_beside(self, lane: "Lane", request: Execution) -> Result | None:
        """Run a check while the execution's sandbox stays open. Return None if there is no room for another sandbox."""
        if not await lane.acquire_now():
            return None
        try:
            return await lane.execute(request)
        except (QuotaExceeded, ProviderUnusable):
            await lane.release()
            return None

    @asynccontextmanager
    async def _lend_slot(self, other: "Lane") -> AsyncIterator[None]:
        """Remove the sandbox, and lend the slot to another lane, which has no sandbox after the block."""
        await self.close_sandbox()
        if other._slot is None:
            other._slot, self._slot = self._slot, None
        try:
            yield
        finally:
            try:
                await other.close_sandbox()
            finally:
                if self._slot is None:
                    self._slot, other._slot = other._slot, None

    async def _execute(self, execution: Execution, on_output: Callable[[str, str], None] | None) -> Result:
        self._tool_calls.clear()
        objective = None if execution.pruning is None else execution.pruning.objective
        is_used = False
        try:
            interpreter = await self._get_interpreter()
            is_used = interpreter.is_alive
            result = await self._execute_in(interpreter, execution, on_output)
        except PrepareError:
            raise  # This is not an outcome of an execution.
        except RlmBatchError as error:
            if is_used and error.meta is None and not self._has_state and isinstance(error, (VolumeError, SandboxLost)):
                # The code did not begin. An earlier execution may have made the sandbox refuse the files.
                await self.close_sandbox()
                if isinstance(error, VolumeError):
                    return await self._execute(execution, on_output)
            meta = error.meta or Meta(variables=execution.variables, provider=self.run.provider.provider_name)
            error.meta = self._complete_meta(meta, execution)
            if objective is not None and error.meta.pruned:  # The trial is pruned, even if its code failed.
                return build_pruned_result(error.meta, objective)
            await self._mark_as_kept(execution, error)
            raise
        finally:
            if not self.run.options.reuse_sandboxes and self.run.plan.state_context is None:
                await self.close_sandbox()
        result.meta = self._complete_meta(result.meta, execution)
        if objective is not None and result.meta.pruned:
            return build_pruned_result(result.meta, objective, result.outputs)
        return result

    async def _execute_in(
        self, interpreter: Interpreter, execution: Execution, on_output: Callable[[str, str], None] | None
    ) -> Result:
        """Run the execution in a sandbox that may have to start first, and record a start that failed."""
        try:
            return await self._execute_and_collect(interpreter, execution, on_output)
        except BaseException as error:
            refusal = await self._record_failed_start(interpreter)
            if refusal is not None and refusal is not error:
                raise refusal from error
            if isinstance(error, ConfigurationError) and error is interpreter.start_error:
                raise ProviderUnusable from error
            raise
        finally:
            log, self._prepare_log = self._prepare_log, None
            if log is not None:
                log.close()

    async def _mark_as_kept(self, execution: Execution, error: RlmBatchError) -> None:
        """Keep the open sandbox of an execution that failed for good, with its inputs in files, if the run may keep it.

        A sandbox with state is kept when it is closed, because later steps may need it.
        """
        run, interpreter = self.run, self._interpreter
        if run.kept_rest == 0 or run.policy.should_retry(error, execution.attempt):
            return
        if interpreter is None or not interpreter.is_alive or error.meta is None:
            return
        run.kept_rest -= 1
        try:
            files = await asyncio.to_thread(build_input_files, execution)
            for path, data in files.items():
                await interpreter.upload(path, data)
        except RlmBatchError as failure:
            execution.inputs_failure = failure.summary
        if not interpreter.is_alive:
            run.kept_rest += 1
            return
        until = time.time() + KEEP_SECONDS
        self._kept = until, execution.index
        error.meta = replace(error.meta, kept_until=until)
        if run.plan.state_context is None:
            await self.close_sandbox()

    async def _execute_and_collect(
        self, interpreter: Interpreter, execution: Execution, on_output: Callable[[str, str], None] | None
    ) -> Result:
        """Run the execution and take its files, even if it failed."""
        run = self.run
        folder_context: AbstractAsyncContextManager[Path | None] = nullcontext()
        execution.archive, execution.archive_problems = b"", ()  # not the files of an earlier attempt
        if run.files is not None:
            folder_context = run.files.open_partial()
        elif self._archives_files(execution):
            folder_context = open_temporary_folder()
        async with folder_context as folder:
            try:
                await self._upload_files(interpreter, execution)
                self._has_state = run.plan.state_context is not None
                request = ExecutionRequest(
                    execution.code,
                    execution.variables,
                    context=run.plan.state_context,
                    encoded=execution.encoded_variables,
                    on_output=on_output,
                    queries=self._make_queries(interpreter, execution),
                    index=execution.seed_numbers,
                    should_prune=None if execution.pruning is None else execution.pruning.should_prune,
                    collect=None if folder is None else run.options.collect or ALL_FILES,
                    collect_to=folder,
                )
                result = await interpreter.run(request)
            except RlmBatchError as error:
                if folder is not None and error.meta is not None:
                    error.meta = await self._take_files(execution, folder, error.meta, is_final=False)
                raise
            if folder is not None:
                result.meta = await self._take_files(execution, folder, result.meta, is_final=True)
            return result

    def _archives_files(self, execution: Execution) -> bool:
        return self.run.check is not None and self.run.check.needs_files and execution.is_checked

    async def _take_files(self, execution: Execution, folder: Path, meta: Meta, *, is_final: bool) -> Meta:
        """Archive an attempt's files for its check, and move the collected ones to the results. Return its new meta."""
        run = self.run
        if self._archives_files(execution):
            execution.archive, problems = await asyncio.to_thread(build_archive, folder, meta.collected)
            execution.archive_problems = (*meta.not_collected, *problems)
            if not run.options.collect:
                meta = replace(meta, collected=(), not_collected=())
        if run.files is not None:
            meta = await asyncio.to_thread(run.files.publish, folder, str(execution.index), meta, is_final=is_final)
        return meta

    def _make_queries(self, interpreter: Interpreter, execution: Execution) -> Queries | None:
        """Return the queries of one attempt; None without a language model."""
        run = self.run
        if run.model_access is None:
            return None
        replays = run.answers is not None and not run.options.cache_queries
        queries = run.model_access.queries(
            interpreter,
            index=execution.index,
            on_event=partial(run.take_event, execution),
            cache=AnswerCache(run.answers, execution.replay_key) if run.answers is not None and replays else None,
            transcript=None if run.transcripts is None else Transcript(partial(run.transcripts.write, execution)),
        )
        execution.summarize_queries = queries.session.summarize
        execution.get_usage = partial(getattr, queries.session.budget, "usage")
        return queries

    async def _upload_files(self, interpreter: Interpreter, execution: Execution) -> None:
        find_uploads = self.run.plan.find_uploads
        uploads = {} if find_uploads is None else find_uploads(execution)
        for path, upload in uploads.items():
            if path not in self._uploaded:
                await interpreter.upload(path, await asyncio.to_thread(upload.read))
                (self._own_files if upload.digest else self._uploaded).add(path)
        for path in self._own_files - uploads.keys():  # Files of earlier executions would fill a reused sandbox.
            await interpreter.upload(path, b"")
            self._own_files.remove(path)

    def _complete_meta(self, meta: Meta, execution: Execution) -> Meta:
        return replace(
            meta,
            index=execution.index,
            group=execution.place.group,
            repeat=execution.place.repeat,
            attempt=execution.attempt,
            earlier_errors=execution.earlier_errors,
            tool_calls=dict(self._tool_calls),
        )

    def _count_calls(self, name: str, tool: Tool) -> Tool:
        @wraps(tool)
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._tool_calls[name] += 1
            return await tool(*args, **kwargs)

        return call

    async def _record_failed_start(self, interpreter: Interpreter) -> QuotaExceeded | None:
        """Tell `admission` about a sandbox that did not start. Return the error of a temporary refusal, or None."""
        permit, self._opening = self._opening, None
        start_error = interpreter.start_error
        if permit is None:  # The sandbox had started.
            return None
        if start_error is None:  # The sandbox was not requested.
            self._permit = permit
            return None
        admission, refusal = self._slots.admission, _find_refusal(start_error)
        if refusal is not None:
            admission.record_refusal(permit, refusal.retry_after, refusal.summary)
        elif isinstance(start_error, ConfigurationError) and admission.has_opened_sandbox:
            admission.record_refusal(permit, None, start_error.summary)
        else:
            admission.record_failure(permit)
        self._has_state = False
        await self.close_sandbox()
        return refusal

    async def _get_interpreter(self) -> Interpreter:
        if self._has_state and self._interpreter is not None:
            if not self._interpreter.is_alive:
                raise StateLost(
                    "the sandbox with the state of the earlier steps is lost: start again with the first step"
                )
            return self._interpreter
        run, now, lifetime = self.run, asyncio.get_running_loop().time, 2 * self.run.options.timeout
        if self._interpreter is not None and (not self._interpreter.is_alive or now() + lifetime > self._expires_at):
            await self.close_sandbox()
        await self.acquire_for_work()
        if self._interpreter is not None:
            return self._interpreter
        await self._slots.wait_for_creation()
        # The sandbox opens later. The lane's permit is for that sandbox.
        interpreter = self._interpreter = run.provider.interpreter(
            run=run.run_id,
            server=run.server_id,
            timeout=run.options.timeout,
            tools=self._tools,
            prepare=run.preparation,
        )
        if run.preparation is not None and run.options.log_output:
            self._prepare_log = OutputLog(run.prepare_lines, "prepare: ", run.log)
            interpreter.on_prepare_output = self._prepare_log.write
        requested_at = now()
        self._expires_at = requested_at + max(run.provider.lifetime, lifetime)
        permit, self._permit = self._permit, None
        assert permit is not None
        self._opening = permit

        def record_opening() -> None:
            self._slots.admission.record_opening(permit)
            self._permit, self._opening = permit, None
            self._opened_at = requested_at
            run.usage.sandboxes += 1

        interpreter.on_start = record_opening
        return interpreter

    def should_wait_out(self, error: BaseException) -> bool:
        """Return whether to wait after a refusal, because the run has had sandboxes. It is not a failed attempt then.

        A sandbox that opened proves the configuration, so a later 400 to 404 is treated as transient. With a revoked
        key, executions that cannot start fail, and running executions continue.
        """
        admission = self._slots.admission
        if self._permit is not None or admission.error is not None:
            return False
        if isinstance(error, QuotaExceeded):
            return admission.had_sandbox_within(REFUSAL_PATIENCE_SECONDS)
        return isinstance(error, ProviderUnusable) and admission.has_opened_sandbox and not self.is_start_timeout_over

    @property
    def is_start_timeout_over(self) -> bool:
        """True if this run has had no sandbox for the time that a sandbox may take to start."""
        return not self._slots.admission.had_sandbox_within(self.run.provider.start_timeout)

    async def release_while_waiting(self) -> None:
        """Remove the sandbox and give back its slot and permit before a long wait, unless the sandbox has state."""
        if not self._has_state:
            await self.release()

    async def close_sandbox(self) -> None:
        """Remove the sandbox, if one is open, or leave it open if it is kept."""
        interpreter, self._interpreter = self._interpreter, None
        kept, self._kept = self._kept, None
        self._uploaded.clear()
        self._own_files.clear()
        try:
            if interpreter is not None and kept is not None:
                await interpreter.keep(*kept)
            elif interpreter is not None:
                await interpreter.shutdown()
        finally:
            if self._opened_at is not None:
                self.run.usage.sandbox_seconds += asyncio.get_running_loop().time() - self._opened_at
                self._opened_at = None
            permit, self._permit, self._opening = self._permit or self._opening, None, None
            if permit is not None:
                self._slots.admission.release(permit)


class CheckLane(Lane):
    """A lane whose executions are checks. Its sandboxes run no other code, and have no volume."""

    def __init__(self, run: Run, slots: Slots) -> None:
        run = copy(run)
        run.provider = run.provider.model_copy(update={"volume_name": None})
        run.check, run.preparation, run.tools, run.kept_rest = None, None, {}, 0
        super().__init__(run, slots)

    async def _execute_and_collect(
        self, interpreter: Interpreter, execution: Execution, on_output: Callable[[str, str], None] | None
    ) -> Result:
        if execution.archive:
            await interpreter.upload(ARCHIVE_NAME, execution.archive)
            await interpreter.execute(UNPACK)
        await self._upload_files(interpreter, execution)
        return await interpreter.execute(
            execution.code, execution.variables, encoded=execution.encoded_variables, refuse_exit=True
        )


def _find_refusal(error: BaseException) -> QuotaExceeded | None:
    """Return the error if it is a refusal, or else None. A lack of file descriptors in its causes is a refusal too."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return QuotaExceeded(
                "this process cannot open more files, and each sandbox takes one or two: raise the limit with "
                "`ulimit -n 4096` first, or lower `max_workers`"
            )
        cause = cause.__cause__ or cause.__context__
    return error if isinstance(error, QuotaExceeded) else None
