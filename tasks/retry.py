"""The rules of retries: for which errors, how often, and after how many seconds."""

from dataclasses import dataclass

from ..sandbox.errors import QuotaExceeded, RlmBatchError

DELAY_COUNT = 7  # the delays that Prefect gets: up to a minute, and it repeats the last
JITTER_FACTOR = 0.5  # a share of the delay, so that lanes that were refused together retry at different times


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries of a flow run."""

    retries: int = 2
    retry_code_errors: bool = False
    idempotent: bool = False

    def should_retry(self, error: BaseException, attempt: int) -> bool:
        """Return whether to retry after an attempt, counted from 1, that ended with this error."""
        if not isinstance(error, RlmBatchError) or attempt > self.retries:
            return False
        return {
            "never": False,
            "if asked": self.retry_code_errors,
            "if idempotent": self.idempotent,
            "always": True,
        }[error.retry_rule]


def get_requested_wait(error: BaseException) -> float:
    """Return the seconds that the provider asked to wait before a retry, or 0 if it did not ask."""
    return (error.retry_after or 0.0) if isinstance(error, QuotaExceeded) else 0.0
