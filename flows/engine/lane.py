"""A lane: one of a flow run's workers, with at most one sandbox open at a time."""

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
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
from ...sandbox.queries.records import Transcript
from ...sandbox.queries.recursion import Queries
from ...sandbox.requests.execution_request import ExecutionRequest
from ...sandbox.result import Result
from ...tasks.capacity.admission import Permit
from ...tasks.capacity.slots import Slot, Slots
from ...tasks.check import ARCHIVE_NAME, UNPACK, build_archive, build_judged_result, explain
from ...tasks.execution import Execution, build_pruned_result
from ...tasks.host_tools import Tool
from ...tasks.kept_sandboxes import build_input_files
from ...tasks.ledger.collected_files import open_temporary_folder
from ...tasks.task_log import OutputLog
from ...tasks.tracing import trace_execution
from .failures import should_retry
from .run import Run

OnOutput = Callable[[str, str], None] | None
ALL_FILES = ["**"]  # the files that a check gets if `collect` names none


class ProviderUnusable(Exception):
    """The lane gets no sandbox, and the execution is not the reason. The cause of this error is the provider's error.

    Either the run opens no more sandboxes, or its first sandbox has shown that the provider's configuration is wrong.
    """


@dataclass(slots=True, eq=False)
class _LaneSandbox:
    """The sandbox of a lane. It opens at its first execution."""

    interpreter: Interpreter
    expires_at: float  # seconds of the event loop's clock
    opened_at: float | None = None  # time of the request, by the same clock; None until it is open
    has_state: bool = False  # True once an execution has begun in the plan's `state_context`
    shared_files: set[str] = field(default_factory=set[str])  # paths of uploaded files for all executions
    own_files: set[str] = field(default_factory=set[str])  # paths of uploaded files for the last execution
    kept: tuple[float, int] | None = None  # epoch seconds until which to keep it, and the failed execution's index
    prepare_log: OutputLog | None = None  # the log of the `prepare` code; None after the first execution


class Lane:
    """A lane: runs executions one after another, each in its own process, in at most one sandbox.

    `acquire` waits for one of the `slots` and then for a permit. `release` removes the sandbox and returns both. A
    reused sandbox is replaced if it is lost, or if its remaining lifetime is too short for an execution. With a
    `state_context` the sandbox is never replaced. If it is lost, the state is lost too, and every later execution
    raises StateLost.
    """

    def __init__(self, run: Run, slots: Slots) -> None:
        self.run = run
        self._slots = slots
        self._slot: Slot | None = None
        self._permit: Permit | None = None  # the permit of the open sandbox, or of the next one
        self._sandbox: _LaneSandbox | None = None
        self._tools: dict[str, Any] = {
            name: self._count_calls(name, tool) if callable(tool) else tool for name, tool in run.tools.items()
        }
        self._tool_calls: Counter[str] = Counter()  # calls in the current execution
        self._check_lane = None if run.check is None else CheckLane(run, slots)

    @property
    def _has_state(self) -> bool:
        return self._sandbox is not None and self._sandbox.has_state

    async def acquire(self, *, has_work: bool = False) -> bool:
        """Wait for a slot and a permit, unless the lane has them. Return False if no work is left for the lane."""
        if self._slot is None:
            self._slot = await self._slots.acquire()
        if self._slot is not None and self._permit is None:
            self._permit = await self._slots.admission.acquire(is_urgent=has_work)
        return self._permit is not None

    async def acquire_for_work(self) -> None:
        """Wait for a slot and a permit, unless the lane has them. Keep waiting if other lanes find no more work.

        Raises ProviderUnusable if this run opens no more sandboxes.
        """
        while self._permit is None:
            error = self._slots.admission.error
            if error is not None:
                raise ProviderUnusable from error
            await self.acquire(has_work=True)

    async def release_if_wanted(self) -> None:
        """Remove the sandbox and return the slot if other runs wait for one. Call this between two executions."""
        if self._slot is None or self._has_state:
            return
        if await self._slots.should_hand_over(self._slot):
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
        """Remove the sandbox, if one is open, and return the slot and the permit."""
        try:
            if self._check_lane is not None:
                await self._check_lane.release()
        finally:
            await self._release_own_sandbox()

    async def _release_own_sandbox(self) -> None:
        try:
            await self.close_sandbox()
        finally:
            slot, self._slot = self._slot, None
            if slot is not None:
                await self._slots.release(slot)

    async def execute(self, execution: Execution, on_output: OnOutput = None) -> Result:
        """Return the result of one attempt at an execution. The flow run may keep the sandbox of one that failed.

        Raises the errors of `Interpreter.run`, with complete `meta`, and ProviderUnusable.
        """
        run = self.run
        with trace_execution(execution, run.provider.provider_name) as set_meta:
            self._tool_calls.clear()
            try:
                result = await self._execute(execution, on_output)
                fields = result.outputs
                meta = execution.complete_meta(result.meta, dict(self._tool_calls))
            except PrepareError:
                raise  # This is not an outcome of an execution.
            except RlmBatchError as error:
                meta = error.meta or Meta(variables=execution.variables, provider=run.provider.provider_name)
                error.meta = meta = execution.complete_meta(meta, dict(self._tool_calls))
                if execution.pruning is None or not meta.pruned:
                    await self._mark_as_kept(execution, error)
                    raise
                fields = {}  # The trial is pruned, although its code failed.
            finally:
                if not run.options.reuse_sandboxes and run.plan.state_context is None:
                    await self.close_sandbox()
            set_meta(meta)
            if execution.pruning is not None and meta.pruned:
                return build_pruned_result(meta, execution.pruning.objective, fields)
            return Result(fields, meta)

    def has_check(self, execution: Execution) -> bool:
        """Return whether a check judges the execution."""
        return self._check_lane is not None and not execution.is_reduction

    async def check(self, execution: Execution) -> Result:
        """Run the check of an execution that has ended. Return the execution's result with the check's fields.

        The check never runs in a sandbox of executions. With reused sandboxes the lane keeps one sandbox for each, if
        a second slot and permit are free now. Otherwise the lane removes the execution's sandbox first, and uses its
        slot for the check. So lanes never wait for each other's second sandbox.

        Raises:
            CheckError: The check failed.
            RlmBatchError: The check's sandbox failed. A retry runs only the check.
            ProviderUnusable: The provider says that its configuration is wrong.
        """
        lane, check = self._check_lane, self.run.check
        judged = execution.ended
        assert lane is not None
        assert check is not None
        assert judged is not None
        try:
            request = await asyncio.to_thread(check.build_execution, execution, judged)
            result = None
            if self.run.options.reuse_sandboxes:
                result = await self._check_beside(lane, request)
            if result is None:
                result = await self._check_instead(lane, request)
        except RlmBatchError as error:
            explained = explain(error, execution, judged)
            raise explained from (None if explained is error else error)
        return build_judged_result(execution, judged, result)

    async def _check_beside(self, lane: "Lane", request: Execution) -> Result | None:
        """Run a check while the execution's sandbox stays open. Return None if there is no room for another sandbox."""
        if not await lane.acquire_now():
            return None
        try:
            return await lane.execute(request)
        except QuotaExceeded:
            await lane.release()
            return None

    async def _check_instead(self, lane: "Lane", request: Execution) -> Result:
        """Run a check after the execution's sandbox is removed, with the slot of that sandbox."""
        await self.close_sandbox()
        lane._slot, self._slot = self._slot, None
        try:
            return await lane.execute(request)
        finally:
            self._slot, lane._slot = lane._slot, None
            await lane.close_sandbox()

    async def _execute(self, execution: Execution, on_output: OnOutput) -> Result:
        """Run the execution in the lane's sandbox, which may have to start first."""
        sandbox = await self._get_sandbox()
        is_reused = sandbox.interpreter.is_alive and not sandbox.has_state
        try:
            return await self._execute_and_collect(sandbox, execution, on_output)
        except BaseException as error:
            has_not_begun = isinstance(error, (VolumeError, SandboxLost)) and error.meta is None
            if sandbox.opened_at is None:
                await self._record_failed_start(sandbox, error)
            elif is_reused and has_not_begun:
                # An earlier execution may have made the sandbox refuse the files.
                await self.close_sandbox()
                if isinstance(error, VolumeError):
                    return await self._execute(execution, on_output)
            raise
        finally:
            if sandbox.prepare_log is not None:
                sandbox.prepare_log.close()
                sandbox.prepare_log = None

    async def _mark_as_kept(self, execution: Execution, error: RlmBatchError) -> None:
        """Keep the sandbox of an execution that failed and is not retried, if the run may keep one more sandbox.

        The execution's code and variables are uploaded as files. A sandbox with state stays in use until the lane
        closes it, because later steps may need it.
        """
        run, sandbox = self.run, self._sandbox
        if run.keepable_count == 0 or should_retry(error, execution.attempt, run.options):
            return
        if sandbox is None or not sandbox.interpreter.is_alive or error.meta is None:
            return
        run.keepable_count -= 1  # The uploads let other lanes run.
        try:
            files = await asyncio.to_thread(build_input_files, execution)
            for path, data in files.items():
                await sandbox.interpreter.upload(path, data)
        except RlmBatchError as failure:
            execution.inputs_failure = failure.summary
        if not sandbox.interpreter.is_alive:
            run.keepable_count += 1
            return
        kept_until = time.time() + KEEP_SECONDS
        sandbox.kept = kept_until, execution.index
        error.meta = replace(error.meta, kept_until=kept_until)
        if run.plan.state_context is None:
            await self.close_sandbox()

    async def _execute_and_collect(self, sandbox: _LaneSandbox, execution: Execution, on_output: OnOutput) -> Result:
        """Run the execution, and then archive or collect its files, even if it failed."""
        run, interpreter = self.run, sandbox.interpreter
        execution.archive, execution.archive_problems = b"", ()  # Forget the files of an earlier attempt.
        async with self._open_collection_folder(execution) as folder:
            try:
                await self._upload_files(sandbox, execution)
                sandbox.has_state = run.plan.state_context is not None
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

    def _open_collection_folder(self, execution: Execution) -> AbstractAsyncContextManager[Path | None]:
        """Open the host's folder for the execution's files; None if nothing needs the files."""
        if self.run.files is not None:
            return self.run.files.open_partial()
        if self._archives_files(execution):
            return open_temporary_folder()
        return nullcontext()

    def _archives_files(self, execution: Execution) -> bool:
        """Return whether the execution's check needs its files."""
        needs_files = self.run.check is not None and self.run.check.needs_files
        return needs_files and not execution.is_reduction

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
        cache = None
        if run.answers is not None and not run.options.cache_queries:
            # The model's own cache is off. An attempt that repeats an interrupted one still finds its paid answers.
            cache = AnswerCache(run.answers, execution.replay_key, has_limits_in_keys=run.key_version < 3)
        queries = run.model_access.queries(
            interpreter,
            index=execution.index,
            on_event=partial(run.take_event, execution),
            cache=cache,
            transcript=None if run.transcripts is None else Transcript(partial(run.transcripts.write, execution)),
        )
        execution.summarize_queries = queries.session.summarize
        execution.get_usage = lambda: queries.session.budget.usage
        return queries

    async def _upload_files(self, sandbox: _LaneSandbox, execution: Execution) -> None:
        """Upload the execution's files, and empty those of the execution before."""
        find_uploads = self.run.plan.find_uploads
        uploads = {} if find_uploads is None else find_uploads(execution)
        for path, upload in uploads.items():
            if path in sandbox.shared_files:
                continue
            await sandbox.interpreter.upload(path, await asyncio.to_thread(upload.read))
            is_for_one_execution = upload.digest != ""
            if is_for_one_execution:
                sandbox.own_files.add(path)
            else:
                sandbox.shared_files.add(path)
        for path in sandbox.own_files - uploads.keys():  # Files of earlier executions would fill a reused sandbox.
            await sandbox.interpreter.upload(path, b"")
            sandbox.own_files.remove(path)

    def _count_calls(self, name: str, tool: Tool) -> Tool:
        """Return a tool that also counts its calls in the current execution."""

        @wraps(tool)
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._tool_calls[name] += 1
            return await tool(*args, **kwargs)

        return call

    async def _record_failed_start(self, sandbox: _LaneSandbox, error: BaseException) -> None:
        """Return the permit of a sandbox that did not start. Raise QuotaExceeded for a temporary refusal.

        Raise ProviderUnusable if the provider says that its configuration is wrong. A sandbox that has opened proves
        the configuration, so a later 400 to 404 is treated as a temporary refusal. With a revoked key, executions that
        cannot start fail, and running executions continue.
        """
        admission, permit = self._slots.admission, self._permit
        start_error = sandbox.interpreter.start_error
        if start_error is None or permit is None:  # The sandbox was not requested.
            return
        self._permit = None
        refusal = _find_refusal(start_error)
        is_misconfigured = isinstance(start_error, ConfigurationError)
        if refusal is None and is_misconfigured and admission.has_opened_sandbox:
            refusal = QuotaExceeded(start_error.text)
        if refusal is None:
            admission.release(permit)
        else:
            admission.record_refusal(permit, refusal.retry_after, refusal.summary)
        await self.close_sandbox()
        if refusal is None:
            if is_misconfigured and error is start_error:
                raise ProviderUnusable from error
        elif refusal is not error:
            raise refusal from error

    async def _get_sandbox(self) -> _LaneSandbox:
        """Return the open sandbox if it has time for an execution, or else a new one."""
        sandbox = self._sandbox
        if sandbox is not None and sandbox.has_state:
            if not sandbox.interpreter.is_alive:
                raise StateLost(
                    "the sandbox with the state of the earlier steps is lost: start again with the first step"
                )
            return sandbox
        read_clock = asyncio.get_running_loop().time
        needed_seconds = 2 * self.run.options.timeout
        if sandbox is not None:
            is_too_old = read_clock() + needed_seconds > sandbox.expires_at
            if is_too_old or not sandbox.interpreter.is_alive:
                await self.close_sandbox()
        await self.acquire_for_work()
        if self._sandbox is None:
            await self._slots.wait_for_creation()
            lifetime = max(self.run.provider.lifetime, needed_seconds)
            self._sandbox = self._make_sandbox(read_clock(), lifetime)
        return self._sandbox

    def _make_sandbox(self, requested_at: float, lifetime: float) -> _LaneSandbox:
        """Return a sandbox that its first execution opens, and that lives for `lifetime` seconds."""
        run = self.run
        interpreter = run.provider.interpreter(
            run=run.run_id,
            server=run.server_id,
            timeout=run.options.timeout,
            tools=self._tools,
            prepare=run.preparation,
        )
        sandbox = _LaneSandbox(interpreter, expires_at=requested_at + lifetime)
        if run.preparation is not None and run.options.log_output:
            sandbox.prepare_log = OutputLog(run.log_lines, "prepare: ", run.log)
            interpreter.on_prepare_output = sandbox.prepare_log.write

        def record_opening() -> None:
            assert self._permit is not None
            self._slots.admission.record_opening(self._permit)
            sandbox.opened_at = requested_at
            run.usage.sandboxes += 1

        interpreter.on_start = record_opening
        return sandbox

    @property
    def should_wait_out_refusal(self) -> bool:
        """True if a refused execution waits for another permit, and the refusal is not a failed attempt.

        This is so while the run has a sandbox, and for some time after it began or lost its last sandbox.
        """
        was_refused = self._permit is None
        may_open_sandboxes = self._slots.admission.error is None
        return was_refused and may_open_sandboxes and not self.is_start_timeout_over

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
        sandbox, self._sandbox = self._sandbox, None
        permit, self._permit = self._permit, None
        try:
            if sandbox is not None and sandbox.kept is not None:
                await sandbox.interpreter.keep(*sandbox.kept)
            elif sandbox is not None:
                await sandbox.interpreter.shutdown()
        finally:
            if sandbox is not None and sandbox.opened_at is not None:
                self.run.usage.sandbox_seconds += asyncio.get_running_loop().time() - sandbox.opened_at
            if permit is not None:
                self._slots.admission.release(permit)


class CheckLane(Lane):
    """A lane whose executions are checks. Its sandboxes run no other code, and have no volume."""

    def __init__(self, run: Run, slots: Slots) -> None:
        run = copy(run)
        run.provider = run.provider.model_copy(update={"volume_name": None})
        run.check = run.preparation = None
        run.tools = {}
        run.keepable_count = 0
        super().__init__(run, slots)

    async def _execute_and_collect(self, sandbox: _LaneSandbox, execution: Execution, on_output: OnOutput) -> Result:
        interpreter = sandbox.interpreter
        if execution.archive:
            await interpreter.upload(ARCHIVE_NAME, execution.archive)
            await interpreter.execute(UNPACK)
        await self._upload_files(sandbox, execution)
        return await interpreter.execute(
            execution.code, execution.variables, encoded=execution.encoded_variables, refuse_exit=True
        )


def _find_refusal(error: BaseException) -> QuotaExceeded | None:
    """Return the refusal of a sandbox; None if the error is another one.

    A lack of file descriptors, as one of the error's causes, is a refusal too.
    """
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return QuotaExceeded(
                "this process cannot open more files, and each sandbox takes one or two: raise the limit with "
                "`ulimit -n 4096` first, or lower `max_workers`"
            )
        cause = cause.__cause__ or cause.__context__
    return error if isinstance(error, QuotaExceeded) else None
