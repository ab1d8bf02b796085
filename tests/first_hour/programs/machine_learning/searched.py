"""A learning rate and an optimizer searched for, and the best trial as variables for the training that follows."""

from rlm_batch import batch, sweep

TRAIN = """
import math

SUBMIT(loss=(math.log10(lr) + 2) ** 2 + {"adam": 0.0, "sgd": 0.5}[optimizer])
"""
space = {"lr": {"low": 1e-5, "high": 1.0, "log": True}, "optimizer": ["adam", "sgd"]}
report = sweep.sync(TRAIN, space=space, trials=15, seed=1, objective="loss", max_workers=2)
print(report)
best = report.best
assert len(report.trials) == 15
assert best.loss == min(trial.loss for trial in report.trials)
assert all(1e-5 <= trial.meta.variables["lr"] <= 1 for trial in report.trials)
frame = report.to_dataframe()
assert frame.loc[frame["loss"].idxmin(), "lr"] == best.meta.variables["lr"]
(again,) = batch.sync(TRAIN, [best.meta.variables])
assert again.loss == best.loss
