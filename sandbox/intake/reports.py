"""What code reports on its way with `report(value, step)`: the values by their steps, and whether it is to go on."""

from __future__ import annotations

from collections.abc import Callable

MAX_REPORTS = 10_000  # steps of one execution
MAX_STEP = 2**53  # up to here floats are exact, which pictures and tables make of steps
NONFINITE = ("nan", "inf", "-inf")  # how a value that is not finite goes over the wire, which has JSON's numbers

# Says of a value at a step whether the execution is to end there.
ShouldPrune = Callable[[int, float], bool]


class Reports:
    """The reports of one execution; `should_prune` is asked after each, on the event loop.

    `values` has the first value of each step. `is_pruned` says that the execution was told to end.
    """

    def __init__(self, should_prune: ShouldPrune | None = None) -> None:
        self.values: dict[int, float] = {}
        self.is_pruned = False
        self._should_prune = should_prune

    async def add(self, value: float | str, step: int) -> bool:
        """Records a value, and returns whether the execution is to end. Raises ValueError for what is no report.

        A coroutine, so that it runs on the event loop, and not in a thread as plain tools do.
        """
        if type(step) is not int or step < 0:
            raise ValueError("the step of a report is a whole number from 0 on")
        if step > MAX_STEP:
            raise ValueError("the step of a report is at most 2**53")
        if type(value) not in (int, float) and value not in NONFINITE:
            raise ValueError("the value of a report is a number")
        if self.is_pruned:
            return True
        if step not in self.values and len(self.values) >= MAX_REPORTS:
            raise ValueError(f"there are {MAX_REPORTS:,} reports of this execution: report every tenth step, say")
        number = float(value)
        self.values.setdefault(step, number)
        self.is_pruned = self._should_prune is not None and self._should_prune(step, number)
        return self.is_pruned
