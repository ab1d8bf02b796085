"""The values that code reports with `report(value, step)`, and the decision to prune the execution."""

from __future__ import annotations

from collections.abc import Callable

MAX_REPORTS = 10_000  # steps of one execution
MAX_STEP = 2**53  # plots and tables convert steps to floats, which are exact up to here
NONFINITE = ("nan", "inf", "-inf")  # non-finite values on the wire, which JSON numbers cannot express

# Returns True if the execution should end at this step, with this value.
ShouldPrune = Callable[[int, float], bool]


class Reports:
    """The reports of one execution. Each report calls `should_prune` on the event loop.

    Attributes:
        values: The first value of each step.
        is_pruned: True if the execution should end.
    """

    def __init__(self, should_prune: ShouldPrune | None = None) -> None:
        self.values: dict[int, float] = {}
        self.is_pruned = False
        self._should_prune = should_prune

    async def add(self, value: float | str, step: int) -> bool:
        """Record a value and return True if the execution should end. Raises ValueError for an invalid report."""
        # This is a coroutine because a plain function would run in a thread.
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise ValueError("the step of a report is a whole number from 0 to 2**53")
        if type(value) not in (int, float) and value not in NONFINITE:
            raise ValueError("the value of a report is a number")
        if self.is_pruned:
            return True
        if step not in self.values and len(self.values) >= MAX_REPORTS:
            raise ValueError(
                f"this execution already made {MAX_REPORTS:,} reports: report less often, such as every tenth step"
            )
        number = float(value)
        self.values.setdefault(step, number)
        self.is_pruned = self._should_prune is not None and self._should_prune(step, number)
        return self.is_pruned
