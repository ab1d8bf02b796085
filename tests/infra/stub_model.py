"""The base of models that tests write: with one estimate for all of them."""

from typing import Any

from rlm_batch.sandbox.queries.budget import Estimate
from rlm_batch.sandbox.queries.session import DEFAULT_OPTIONS, Message, RequestOptions


class StubModel:
    """A model without `ask`."""

    name = "stub"

    async def estimate_max_usage(
        self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS, *, is_priced: bool = True
    ) -> Estimate:
        return Estimate(10, 5)

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name}
