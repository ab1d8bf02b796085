"""A flow that runs after each sweep that has completed on the Prefect server, and reads what it has found.

Run beside `rlm-batch up`, until Ctrl-C, with PREFECT_API_URL set: the event `rlm-batch.run.completed` starts it.
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
                match={"rlm-batch.flow": "sweep"},
                parameters={
                    "results_path": "{{ event.payload.results_path }}",
                    "loss": "{{ event.payload.best.value }}",
                },
            )
        ],
    )
