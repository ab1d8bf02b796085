"""A flow that runs after each completed sweep on the Prefect server, and reads the sweep's report.

Start this program while `rlm-batch up` is running, with PREFECT_API_URL set. Until Ctrl-C, the event
`rlm-batch.run.completed` starts the flow.
"""

from prefect import flow
from prefect.events import DeploymentEventTrigger

from rlm_batch import load_report


@flow(log_prints=True)
def publish(results_path: str, loss: float) -> None:
    report = load_report(results_path)
    print(f"{report.name}: {loss} is the best of {len(report.results)}, with {report.best.meta.variables}")


if __name__ == "__main__":
    publish.serve(
        name="after-sweeps",
        triggers=[
            DeploymentEventTrigger(
                name="a sweep has completed",
                expect={"rlm-batch.run.completed"},
                match={"rlm-batch.flow": "rlm-sweep"},
                parameters={
                    "results_path": "{{ event.payload.results_path }}",
                    "loss": "{{ event.payload.best.value }}",
                },
            )
        ],
    )
