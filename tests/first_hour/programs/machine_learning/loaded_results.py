"""A notebook the next day: the results of a run by its path, as a DataFrame, and what a failed trial printed."""

from rlm_batch import Failure, load_report, sweep

CODE = "print('layers:', layers)\nassert layers < 3, 'out of memory'\nSUBMIT(loss=1 / layers)"
run = sweep.sync(CODE, {"layers": [1, 2, 3]}, objective="loss", on_failure="return", results_path="results")

report = load_report("results")
frame = report.to_dataframe()
print(frame)
assert report.best.meta.variables == run.best.meta.variables == {"layers": 2}
assert frame["loss"].min() == 0.5
failed = report.results[2]
assert isinstance(failed, Failure)
assert failed.meta.stdout == "layers: 3\n"
assert "out of memory" in failed.error.summary
