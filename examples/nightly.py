"""A sweep that emits an event if its best trial is better than before. A Prefect variable stores the best loss so far.

automations.yaml sends a message for the event. To run the sweep every night, deploy it:

    prefect deploy examples/nightly.py:nightly --name nightly --pool rlm-batch --cron "0 3 * * *"
"""

import asyncio
from pathlib import Path

from prefect import flow
from prefect.events import emit_event
from prefect.variables import Variable

from rlm_batch import sweep

CODE = Path(__file__).with_name("learning_rate.py").read_text()
NAME = "learning_rate"


@flow
async def nightly(batch_sizes: list[int]) -> float:
    report = await sweep(CODE, grid={"lr": [0.001, 0.01], "batch_size": batch_sizes}, objective="loss")
    assert report.best is not None  # a sweep without a successful trial has raised before
    loss = report.best.loss
    before = await Variable.aget(f"best_loss_{NAME}", default=None)
    if before is None or loss < before:
        await Variable.aset(f"best_loss_{NAME}", loss, overwrite=True)
    if before is not None and loss < before:
        emit_event(
            "rlm-batch.sweep.improved",
            resource={"prefect.resource.id": f"rlm-batch.sweep.{NAME}"},
            payload={
                "text": f"{NAME}: the best loss is {loss:.6g}, and was {before:.6g}",
                "best": {"loss": loss, **report.best.meta.variables},
                "results": report.results_path,
            },
        )
    return loss


if __name__ == "__main__":
    print(asyncio.run(nightly([32, 64])))
