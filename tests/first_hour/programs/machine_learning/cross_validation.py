"""A regularisation path: numpy's metrics as they come, over a grid made by linspace."""

import asyncio

import numpy as np

from rlm_batch import sweep

FIT = """
import numpy as np

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 4))
y = X @ np.array([1.0, 0.0, -2.0, 0.5]) + rng.normal(scale=0.1, size=60)
scores = []
for fold in range(3):
    test = np.arange(60) % 3 == fold
    A, b = X[~test], y[~test]
    w = np.linalg.solve(A.T @ A + alpha * np.eye(4), A.T @ b)
    scores.append(1 - ((y[test] - X[test] @ w) ** 2).sum() / ((y[test] - y[test].mean()) ** 2).sum())
SUBMIT(r2=np.mean(scores), scores=np.array(scores), best_fold=np.argmax(scores), weights=w)
"""

report = asyncio.run(
    sweep(
        FIT,
        grid={"alpha": np.linspace(0, 20, 3)},
        objective="r2",
        direction="maximize",
        provider_options={"packages": "environment"},
    )
)
print(report)
assert report.best.meta.variables == {"alpha": 0.0}
assert report.best.r2 > 0.9
assert len(report.best.scores) == 3
assert np.argmax(report.best.scores) == report.best.best_fold
