"""A lane: one of a flow run's workers, with at most one sandbox open at a time."""

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..blocks.language_model.model_access import ModelAccess
from ..blocks.provider import SandboxProvider
from ..sandbox.driver_settings import Preparation
from ..sandbox.errors import (
    ConfigurationError,
    PrepareError,
    QuotaExceeded,
    RlmBatchError,
    StateLost,
)
from ..sandbox.interpreter import Interpreter
from ..sandbox.meta import Meta
from ..sandbox.result import Result
from .capacity.admission import Permit
from .capacity.slots import Slot, Slots
from .execution import Execution, build_pruned_result
from .host_tools import Tool
from .ledger.collected_files import CollectedFilesStore
from .task_log import OutputLog
from .tracing import trace_execution


class ProviderUnusable(Exception):
    """The provider says that its configuration is wrong, in the error that is this one's cause.

    Before the flow run has had a sandbox that ends it. Later no execution is begun any more.
    """


class Lane:
    """Runs executions one after the other, each in a process of its own.

    It opens sandboxes between `acquire`, which waits for one of the `slots` and then for a permit, and `release`. With
    `reuse` a sandbox stays open from one execution to the next, and is replaced when it was lost or when what remains
    of its lifetime is shorter than an execution may take; otherwise each execution has a sandbox of its own. With a
    `context` they share one process and its state, and the sandbox is never replaced: when it is lost, so is the state,
    and every later execution raises StateLost. `model_access` is what each execution may ask, `uploads` are files
    that each finds, by their paths in the sandbox; `run` and `server` are for the sandbox's labels. `preparation` runs
    in each sandbox before the first execution, and what it writes goes to the log that is opened for it.
    `tools` are functions of the host that code may call; the calls are counted in `meta`. `collect` are
    patterns of the files that each execution brings home, which go to `files`.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        run: str,
        *,
        server: str = "",
        reuse: bool,
        timeout: float,
        context: str | None = None,
        slots: Slots,
        model_access: ModelAccess | None = None,
        uploads: dict[str, Path] | None = None,
        preparation: Preparation | None = None,
        open_prepare_log: Callable[[], OutputLog] | None = None,
        tools: dict[str, Tool] | None = None,
        collect: list[str] | None = None,
        files: CollectedFilesStore | None = None,
    ) -> None:
        self.provider = provider
        self._run = run
        self._server = server
        self._reuse = reuse
        self._timeout = timeout
        self._slots = slots
        self._slot: Slot | None = None
        self._permit: Permit | None = None  # of the sandbox that is open, or will be
        self._opening: Permit | None = None  # of the sandbox that is being opened
        self._model_access = model_access
        self._uploads = uploads or {}
        self._preparation = preparation
        self._open_prepare_log = open_prepare_log
        self._tools = {name: self._count_calls(name, tool) for name, tool in (tools or {}).items()}
        self._tool_calls: Counter[str] = Counter()  # of the execution under way
        self._collect = collect
        self._files = files if collect else None
        self._prepare_log: OutputLog | None = None
        self._context = context
        self._has_state = False
        self._interpreter: Interpreter | None = None
        self._expires_at = 0.0
        self._opened_at: float | None = None  # when the sandbox that is open was asked for, by the loop's clock
        self.opened_count = 0  # sandboxes, and
        self.open_seconds = 0.0  # how long those that are closed were open, together

    async def acquire(self, *, has_work: bool = False) -> bool:
        """Waits for a slot and a permit, unless it has them; False where there is no more work to have them for."""
        if self._slot is None:
            self._slot = await self._slots.acquire()
        if self._slot is not None and self._permit is None:
            self._permit = await self._slots.admission.acquire(is_urgent=has_work)
        return self._permit is not None

    async def acquire_for_work(self) -> None:
        """Waits for a slot and a permit, unless it has them, also where other lanes have found no more work.

        Raises ProviderUnusable where this run opens no sandbox any more.
        """
        while self._permit is None:
            if (error := self._slots.admission.error) is not None:
                raise ProviderUnusable from error
            await self.acquire(has_work=True)

    async def release_if_wanted(self) -> None:
        """Between two executions, gives up the slot and the sandbox where other runs have waited for it long enough."""
        if self._slot is not None and not self._has_state and await self._slots.should_hand_over(self._slot):
            await self.release()

    async def release(self) -> None:
        """Removes the sandbox, if one is open, and gives back the slot and the permit."""
        try:
            await self.close_sandbox()
        finally:
            slot, self._slot = self._slot, None
            if slot is not None:
                await self._slots.release(slot)

    async def execute(self, execution: Execution, on_output: Callable[[str, str], None] | None = None) -> Result:
        """The result of one attempt at an execution. Raises what `Interpreter.execute` raises, with `meta` complete.

        Raises ProviderUnusable where the provider says that its configuration is wrong.
        """
        run = partial(self._execute, execution, on_output)
        return await trace_execution(execution, self.provider.provider_name, run)

    async def _execute(self, execution: Execution, on_output: Callable[[str, str], None] | None) -> Result:
        self._tool_calls.clear()
        try:
            async with self._use_interpreter() as interpreter:
                try:
                    result = await self._execute_and_publish(interpreter, execution, on_output)
                except ConfigurationError as error:
                    if error is interpreter.start_error:
                        raise ProviderUnusable from error
                    raise
        except PrepareError:
            raise  # no execution's
        except RlmBatchError as error:
            meta = error.meta or Meta(variables=execution.variables, provider=self.provider.provider_name)
            error.meta = self._complete_meta(meta, execution)
            if meta.pruned and execution.pruning is not None:  # which is decided, however its code took that
                return build_pruned_result(error.meta, execution.pruning.objective)
            raise
        finally:
            if not self._reuse and self._context is None:
                await self.close_sandbox()
        result.meta = self._complete_meta(result.meta, execution)
        if result.meta.pruned and execution.pruning is not None:
            return build_pruned_result(result.meta, execution.pruning.objective, result.outputs)
        return result

    async def _execute_and_publish(
        self, interpreter: Interpreter, execution: Execution, on_output: Callable[[str, str], None] | None
    ) -> Result:
        """Executes, and puts the files that came home where the ledger has them, whatever the end was."""
        if self._files is None:
            return await self._prepare_and_execute(interpreter, execution, on_output)
        files, name = self._files, execution.key[:12] if execution.index is None else str(execution.index)
        async with files.open_partial() as partial:
            try:
                result = await self._prepare_and_execute(interpreter, execution, on_output, partial)
            except RlmBatchError as error:
                if error.meta is not None:
                    error.meta = await asyncio.to_thread(files.publish, partial, name, error.meta, is_final=False)
                raise
            result.meta = await asyncio.to_thread(files.publish, partial, name, result.meta, is_final=True)
            return result

    async def _prepare_and_execute(
        self,
        interpreter: Interpreter,
        execution: Execution,
        on_output: Callable[[str, str], None] | None,
        collect_to: Path | None = None,
    ) -> Result:
        for path, file in self._uploads.items():
            await interpreter.upload(path, await asyncio.to_thread(file.read_bytes))
        self._has_state = self._context is not None
        access = self._model_access
        return await interpreter.execute(
            execution.code,
            execution.variables,
            context=self._context,
            encoded=execution.encoded_variables,
            on_output=on_output,
            queries=None if access is None else access.queries(interpreter, index=execution.index),
            index=execution.index,
            should_prune=None if execution.pruning is None else execution.pruning.should_prune,
            collect=None if collect_to is None else self._collect,
            collect_to=collect_to,
        )

    def _complete_meta(self, meta: Meta, execution: Execution) -> Meta:
        return replace(
            meta,
            index=execution.index,
            attempt=execution.attempt,
            earlier_errors=execution.earlier_errors,
            tool_calls=dict(self._tool_calls),
        )

    def _count_calls(self, name: str, tool: Tool) -> Tool:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._tool_calls[name] += 1
            return await tool(*args, **kwargs)

        return call

    async def open_sandbox(self) -> Interpreter:
        """The interpreter in this lane's sandbox, which is opened if it is not yet."""
        async with self._use_interpreter() as interpreter:
            await interpreter.start()
        return interpreter

    @asynccontextmanager
    async def _use_interpreter(self) -> AsyncIterator[Interpreter]:
        """Within this, the interpreter for this lane's sandbox, which is opened by what is first asked of it.

        `admission` learns how that went.
        """
        interpreter = await self._get_interpreter()
        try:
            try:
                yield interpreter
            finally:
                log, self._prepare_log = self._prepare_log, None
                if log is not None:
                    log.close()
        except BaseException as error:
            permit, self._opening = self._opening, None
            start_error = interpreter.start_error
            if permit is None:  # it had started
                raise
            if start_error is None:  # it was not asked to
                self._permit = permit
                raise
            admission, refusal = self._slots.admission, _find_refusal(start_error)
            if isinstance(start_error, ConfigurationError) and admission.has_opened_sandbox:
                admission.record_refusal(permit, None, start_error.summary)
            elif refusal is None:
                admission.record_failure(permit)
            else:
                admission.record_refusal(permit, refusal.retry_after, refusal.summary)
            self._has_state = False
            await self.close_sandbox()
            if refusal is None or refusal is error:
                raise
            raise refusal from error

    async def _get_interpreter(self) -> Interpreter:
        if self._has_state and self._interpreter is not None:
            if not self._interpreter.is_alive:
                raise StateLost("the sandbox that held the state of the earlier steps has gone: start from the first")
            return self._interpreter
        now = asyncio.get_running_loop().time()
        if self._interpreter is not None and (
            not self._interpreter.is_alive or now + 2 * self._timeout > self._expires_at
        ):
            await self.close_sandbox()
        if self._permit is None:
            await self.acquire_for_work()
        if self._interpreter is None:
            await self._slots.wait_for_creation()
            self._interpreter = self._make_interpreter()
        return self._interpreter

    def _make_interpreter(self) -> Interpreter:
        """An interpreter whose sandbox is not open yet; it has the lane's permit until then."""
        interpreter = self.provider.interpreter(
            run=self._run, server=self._server, timeout=self._timeout, tools=self._tools, prepare=self._preparation
        )
        if self._preparation is not None and self._open_prepare_log is not None:
            self._prepare_log = self._open_prepare_log()
            interpreter.on_prepare_output = self._prepare_log.write
        now = asyncio.get_running_loop().time()
        self._expires_at = now + max(self.provider.lifetime, 2 * self._timeout)
        permit = self._opening = self._permit
        self._permit = None
        assert permit is not None

        def record_opening() -> None:
            self._slots.admission.record_opening(permit)
            self._permit, self._opening = permit, None
            self._opened_at = now
            self.opened_count += 1

        interpreter.on_start = record_opening
        return interpreter

    def should_wait_out(self, error: BaseException) -> bool:
        """Whether a refusal does not count as a failed attempt, because the run has sandboxes and goes on.

        Whoever has had sandboxes with a configuration has no wrong one: providers answer 400 to 404 in troubles of
        their own, and a key that was taken back ends what cannot be begun, not what runs.
        """
        admission = self._slots.admission
        if self._permit is not None or admission.error is not None:
            return False
        if isinstance(error, QuotaExceeded):
            return admission.has_recent_sandbox
        return isinstance(error, ProviderUnusable) and admission.has_opened_sandbox and not self.is_start_timeout_over

    @property
    def is_start_timeout_over(self) -> bool:
        """Whether this run has had no sandbox for so long as one may take to start."""
        return not self._slots.admission.had_sandbox_within(self.provider.start_timeout)

    async def release_while_waiting(self) -> None:
        """Removes the sandbox and gives back its slot and permit, before a long wait, unless the sandbox has state."""
        if not self._has_state:
            await self.release()

    async def close_sandbox(self) -> None:
        """Removes the sandbox, if one is open."""
        interpreter, self._interpreter = self._interpreter, None
        try:
            if interpreter is not None:
                await interpreter.shutdown()
        finally:
            if self._opened_at is not None:
                self.open_seconds += asyncio.get_running_loop().time() - self._opened_at
                self._opened_at = None
            permit, self._permit, self._opening = self._permit or self._opening, None, None
            if permit is not None:
                self._slots.admission.release(permit)


def _find_refusal(error: BaseException) -> QuotaExceeded | None:
    """The refusal for now that an error is, or comes from: a process that has no descriptor left is one too."""
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and getattr(cause, "errno", None) not in (errno.EMFILE, errno.ENFILE):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return error if isinstance(error, QuotaExceeded) else None
    return QuotaExceeded(
        "this process can open no more files or connections, and each sandbox takes one or two: raise its limit before "
        "it starts with `ulimit -n 4096`, or use fewer workers"
    )
