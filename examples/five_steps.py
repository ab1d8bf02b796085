"""Five steps in one sandbox: the fifth step sees the names of the first, and each step is a separate task run."""

import asyncio

from rlm_batch import sequence

STEPS = ["import math\nbase = 10\nSUBMIT(task=0, value=math.factorial(base))"] + [
    f"SUBMIT(task={i}, value=math.factorial(base + {i}))" for i in range(1, 5)
]

if __name__ == "__main__":
    for result in asyncio.run(sequence(STEPS)):
        print(f"Task {result.task}: {result.value}")
