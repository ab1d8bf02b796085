"""Which errors are tried again, how often, and after how long."""

import asyncio
from dataclasses import dataclass

from ..sandbox.errors import QuotaExceeded, RlmBatchError

BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # before each retry; the last stands for all later ones
JITTER_FACTOR = 0.5  # of the delay: lanes that were refused together do not come back together


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which errors are retried, how often, and until when (`deadline_at`, by the event loop's clock; None for ever)."""

    retries: int = 2
    retry_code_errors: bool = False
    idempotent: bool = False
    deadline_at: float | None = None

    def should_retry(self, error: BaseException, attempt: int) -> bool:
        """Whether to retry an execution whose attempt of that number, from 1, ended with this error: by its type."""
        if not isinstance(error, RlmBatchError) or attempt > self.retries:
            return False
        return {
            "never": False,
            "if asked": self.retry_code_errors,
            "if idempotent": self.idempotent,
            "always": True,
        }[error.retry_rule]

    def is_too_late(self, error: BaseException) -> bool:
        """Whether the provider asks to wait for longer than the flow run has."""
        if self.deadline_at is None:
            return False
        return asyncio.get_running_loop().time() + get_requested_wait(error) >= self.deadline_at


def get_requested_wait(error: BaseException) -> float:
    """The seconds that the provider asked to wait before a retry; 0 where it did not ask."""
    return (error.retry_after or 0.0) if isinstance(error, QuotaExceeded) else 0.0


def compute_backoff(number: int) -> float:
    """Seconds before the retry of that number, from 1, without jitter."""
    return BACKOFF_SECONDS[min(number, len(BACKOFF_SECONDS)) - 1]
