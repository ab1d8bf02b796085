"""A run of a deployment of the batch flow."""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.flow_engine import run_flow_async

from rlm_batch import batch


class Deployed:
    """A run of a deployment of a flow, executed as a worker's process executes it."""

    def __init__(self, run: FlowRun, flow: Any = batch) -> None:
        self.run, self.flow = run, flow

    @classmethod
    async def made(
        cls,
        pool: str | None = None,
        job_variables: dict[str, Any] | None = None,
        deployment: str | None = None,
        flow: Any = batch,
        **parameters: Any,
    ) -> "Deployed":
        """Create a deployment and a scheduled run with these parameters, for workers of the pool if one is named."""
        async with get_client() as client:
            deployment_id = await client.create_deployment(
                await client.create_flow_from_name(flow.name),
                deployment or uuid.uuid4().hex,
                entrypoint=f"{flow.fn.__module__}.{flow.fn.__name__}",
                work_pool_name=pool,
            )
            run = await client.create_flow_run_from_deployment(
                deployment_id, parameters=parameters, job_variables=job_variables
            )
            return cls(run, flow)

    async def execute(self) -> State[Any]:
        """Execute the run and return its final state."""
        return await run_flow_async(
            self.flow,
            self.run,
            self.run.parameters,
            return_type="state",
        )  # type: ignore[return-value]

    async def retry(self) -> SetStateStatus:
        """Retry the run as the button in the UI does, and return the server's answer."""
        async with get_client() as client:
            state = State(type=StateType.SCHEDULED, name="AwaitingRetry", message="Retry from the UI")
            answer = await client.set_flow_run_state(self.run.id, state, force=False)
            self.run = await client.read_flow_run(self.run.id)
            return answer.status

    async def ended(self) -> State[Any]:
        """Wait until a worker has executed the run, and return its final state."""
        async with get_client() as client:
            for _ in range(1200):
                self.run = await client.read_flow_run(self.run.id)
                if self.run.state is not None and self.run.state.is_final():
                    return self.run.state
                await asyncio.sleep(0.1)
        raise AssertionError(f"it did not end: {self.run.state}")

    async def read_deployment_name(self) -> str:
        """Return the name of the run's deployment."""
        assert self.run.deployment_id is not None
        async with get_client() as client:
            return (await client.read_deployment(self.run.deployment_id)).name

    async def list_artifacts(self, kind: str) -> list[tuple[str | None, str | None]]:
        """List keys and descriptions of the run's artifacts of that type, oldest first."""
        async with get_client() as client:
            wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[self.run.id]))
            artifacts = await client.read_artifacts(artifact_filter=wanted)
        artifacts.sort(key=lambda artifact: artifact.created or datetime.min.replace(tzinfo=UTC))
        return [(artifact.key, artifact.description) for artifact in artifacts if artifact.type == kind]
