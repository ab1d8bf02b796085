"""Three pieces of code in three sandboxes, from a Python program."""

import asyncio

from rlm_batch import batch

CODE = [
    "result = sum(range(1000)); SUBMIT(total=result)",
    "import math; SUBMIT(pi_approx=math.pi)",
    "SUBMIT(greeting='Hello from a sandbox')",
]

if __name__ == "__main__":
    total, pi, greeting = asyncio.run(batch(CODE, max_workers=3))
    print(total.total, pi.pi_approx, greeting.greeting)
