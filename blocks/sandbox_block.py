"""The base class of the sandbox blocks: Prefect's `trigger`, `wait_for_completion` and `fetch_result` for jobs."""

import asyncio
import contextvars
from abc import ABC
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from prefect.blocks.abstract import JobBlock, JobRun

from ..sandbox.result import Result
from .own_block import OwnBlock, async_dispatch
from .provider import SandboxProvider


class SandboxRun(JobRun[Result]):
    """One piece of code that `trigger` has started, in a new sandbox. In async code, await its methods.

    Args:
        future: Has the result or the error of the code when it has ended.
    """

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    async def await_for_completion(self, timeout: float | None = None) -> None:
        """Wait as `wait_for_completion` does, in async code."""
        async with asyncio.timeout(timeout):
            await asyncio.shield(asyncio.wrap_future(self._future))

    @async_dispatch(await_for_completion)
    def wait_for_completion(self, timeout: float | None = None) -> None:  # type: ignore[reportIncompatibleMethodOverride]
        """Wait until the code has ended and its sandbox is deleted.

        Args:
            timeout: Seconds to wait; None for no limit. The code continues after a timeout.

        Raises:
            TimeoutError: The code has not ended within `timeout`.
            RlmBatchError: The code or its sandbox failed, as `run` raises it.
        """
        self._future.result(timeout)

    async def afetch_result(self) -> Result:
        """Return the result as `fetch_result` does, in async code."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    @async_dispatch(afetch_result)
    def fetch_result(self) -> Result:  # type: ignore[reportIncompatibleMethodOverride]
        """Wait until the code has ended, and return what it submitted.

        Returns:
            The result.

        Raises:
            RlmBatchError: The code or its sandbox failed, as `run` raises it.
        """
        return self._future.result()


class SandboxBlock(SandboxProvider, OwnBlock, JobBlock, ABC):
    """A sandbox provider as a Prefect block."""

    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]

    def get_account_setting(self, name: str) -> Any:
        """Return a setting of the account: that of this block, or else that of its credentials if it has some."""
        value = super().get_account_setting(name)
        credentials = getattr(self, "credentials", None)
        if value is None and credentials is not None:
            return getattr(credentials, name)
        return value

    async def atrigger(self, *arguments: Any, **options: Any) -> SandboxRun:
        """Start the code as `trigger` does, in async code."""
        return self._start_run(*arguments, **options)

    @async_dispatch(atrigger)
    def trigger(  # type: ignore[reportIncompatibleMethodOverride]
        self,
        code: str | Callable[..., object],
        variables: dict[str, Any] | None = None,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
    ) -> SandboxRun:
        """Start one piece of code in a new sandbox, and return at once. In async code, await the call.

        Args:
            code: The code, or a function.
            variables: Values that the code finds as global variables.
            timeout: Seconds for the execution; None for no limit.
            tools: Functions of the host that code may call by name.

        Returns:
            The started run, with `wait_for_completion` and `fetch_result`.
        """
        return self._start_run(code, variables, timeout=timeout, tools=tools)

    def _start_run(self, *arguments: Any, **options: Any) -> SandboxRun:
        thread = ThreadPoolExecutor(1, thread_name_prefix="rlm-batch-trigger")
        try:
            context = contextvars.copy_context()
            return SandboxRun(thread.submit(lambda: context.run(self.run, *arguments, **options)))
        finally:
            thread.shutdown(wait=False)  # The thread ends after the run.
