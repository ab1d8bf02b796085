"""The parameters that the flows share: their types, with bounds and descriptions for the schema that the UI shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ..blocks.language_model.model_access import Asking, asking
from ..sandbox.queries import RunTracked

TASK_RUNS = 1000  # of one flow run, at most: a server records some fifty a second, 250 with the settings that we ship

Provider = Annotated[
    str,
    Field(
        min_length=1,
        description="local, daytona, modal, local:none (no isolation), or a saved block such as daytona-sandbox/NAME",
    ),
]
VolumeName = Annotated[
    str | None, Field(description="The volume that every sandbox has; by default the provider's own, if any")
]
MaxWorkers = Annotated[int, Field(ge=1, description="Executions at one time, each in a sandbox of its own")]
Timeout = Annotated[float, Field(gt=0, description="Seconds for each execution")]
Retries = Annotated[int, Field(ge=0, description="How often an execution whose sandbox failed is tried again")]
RetryCodeErrors = Annotated[bool, Field(description="Try again also when the code itself failed or timed out")]
Idempotent = Annotated[bool, Field(description="Try again also when a sandbox was lost while the code may have run")]
OnFailure = Annotated[
    Literal["raise", "return"], Field(description="Fail the flow run when executions failed, or return the failures")
]
Deadline = Annotated[float | None, Field(gt=0, description="Seconds for the whole flow run")]
ReuseSandboxes = Annotated[bool, Field(description="Keep a worker's sandbox; each execution still has its own process")]
ExecutionsPerTask = Annotated[
    int | None, Field(ge=1, description="Executions in one task run; by itself about 1,000 runs")
]
CacheResults = Annotated[bool, Field(description="Take results of identical executions of earlier flow runs")]
ResultsPath = Annotated[
    str | None, Field(description="The ledger's directory or location; by default one below the results root")
]
Shards = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    Field(description="Flow runs on the workers that the executions are shared out to, or auto; by default none"),
]
LogOutput = Annotated[
    bool, Field(description="What the code writes is in its task run's log as it comes, 200 lines of each execution")
]

Model = Annotated[
    str | None,
    Field(
        description="What the code may ask: a model in LiteLLM's naming, or a saved block such as language-model/NAME"
    ),
]
BatchConcurrency = Annotated[int, Field(ge=1, description="Requests to the model at one time, for each execution")]
MaxDepth = Annotated[int, Field(ge=0, description="How deep recursive queries may go; plain code is at depth 0")]
MaxLlmCalls = Annotated[int | None, Field(ge=0, description="Calls of the model, for each execution")]
MaxLlmTokens = Annotated[int | None, Field(ge=0, description="Tokens of prompts and answers, for each execution")]
MaxCost = Annotated[float | None, Field(ge=0, description="US dollars for the model, for the whole flow run")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parameters that the flows share, as they were given."""

    provider: str
    max_workers: int
    timeout: float
    retries: int
    retry_code_errors: bool
    idempotent: bool
    on_failure: Literal["raise", "return"]
    deadline: float | None
    reuse_sandboxes: bool
    executions_per_task: int | None
    cache_results: bool
    results_path: str | None
    log_output: bool
    language_model: str | None
    batch_concurrency: int
    max_depth: int
    max_llm_calls: int | None
    max_llm_tokens: int | None
    max_cost: float | None
    shards: int | Literal["auto"] | None = None

    async def asking(self, track: RunTracked) -> Asking | None:
        """What each execution may ask, None without a model. Raises ConfigurationError."""
        if self.language_model is None:
            return None
        return await asking(
            self.language_model,
            max_cost=self.max_cost,
            track=track,
            batch_concurrency=self.batch_concurrency,
            max_depth=self.max_depth,
            max_llm_calls=self.max_llm_calls,
            max_llm_tokens=self.max_llm_tokens,
        )
