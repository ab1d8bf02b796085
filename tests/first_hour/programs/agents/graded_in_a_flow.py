"""A synchronous Prefect flow of one's own: a sweep for the settings, then an answer graded for each case."""

from typing import Any

from prefect import flow, task

from rlm_batch import CodeError, run_code, sweep

THRESHOLD = "SUBMIT(wrong=sum((score > threshold) != is_spam for score, is_spam in [(0.2, False), (0.7, True)]))"
ANSWERS = ["SUBMIT(spam=score > threshold)", "SUBMIT(spam=score >= treshold)"]


@task
def grade(answer: Any) -> str:
    return "right" if answer.spam else "wrong"


@flow
def evaluate() -> list[str]:
    report = sweep.sync(THRESHOLD, {"threshold": [0.1, 0.5, 0.9]}, objective="wrong")
    case = {"score": 0.7, "threshold": report.best.meta.variables["threshold"]}
    grades: list[str] = []
    futures: Any = run_code.map(ANSWERS, [case] * len(ANSWERS))
    for future in futures:
        answer = future.result(raise_on_failure=False)
        grades.append(answer.summary if isinstance(answer, CodeError) else grade(answer))
    return grades


right, misspelled = evaluate()
print(right, misspelled)
assert right == "right"
assert "treshold" in misspelled
