"""Five executions in one sandbox, one after the other, with no flow and no Prefect server."""

from rlm_batch import LocalInterpreter

if __name__ == "__main__":
    with LocalInterpreter(timeout=300) as interpreter:
        for i in range(5):
            result = interpreter.execute(f"import math; SUBMIT(task={i}, value=math.factorial({i + 10}))")
            print(f"Task {result.task}: {result.value}")
