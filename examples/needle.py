"""A question over a million characters that no prompt ever holds whole.

python examples/needle.py openai/gpt-4o-mini      # with OPENAI_API_KEY in the environment
python examples/needle.py ollama_chat/llama3.2    # a model on your own machine
python examples/needle.py --stand-in              # no model: a server with scripted answers
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from rlm_batch import rlm

QUESTION = "What is the magic number of the city of Ghent? Answer with the number alone."
CITIES = ("Aarhus", "Basel", "Cork", "Delft", "Ghent", "Lund", "Nantes", "Porto", "Turku", "Zagreb")
SERVER = Path(__file__).resolve().parents[1] / "tests" / "standins" / "openai_chat.py"
TURN = """The lines about Ghent are few: I look for them, and have a model read the best.

```python
lines = [line for line in context.splitlines() if "Ghent" in line and "magic" in line]
print(len(context), "characters,", len(lines), "lines")
SUBMIT(answer=llm_query("Which number does this line name? Answer with the number alone.\\n" + lines[0]))
```"""


def haystack(number: int, characters: int = 1_000_000) -> str:
    """Return lines about cities. One of the lines contains the number."""
    chance = random.Random(number)
    lines, size = [], 0
    while size < characters:
        line = f"On day {len(lines)} it rained {chance.randrange(100)} mm in {chance.choice(CITIES)}."
        lines.append(line)
        size += len(line) + 1
    lines[chance.randrange(len(lines))] = f"The magic number of the city of Ghent is {number}."
    return "\n".join(lines)


async def main(model: str) -> None:
    """Ask the question, and print the answer, the turns and the cost."""
    found = await rlm(QUESTION, model, haystack(271_828))
    print(f"Answer: {found.answer}")
    for turn in found.trajectory:
        print(f"\n{turn['code']}\n  -> {turn['output']}")
    used = found.queries
    print(f"\n{used.calls} calls, {used.prompt_tokens} + {used.completion_tokens} tokens, cost {used.cost}")


def with_stand_in() -> None:
    """Run `main` with this repository's scripted server instead of a model."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as script:
        json.dump([["writing Python", TURN], ["Which number", "271828"]], script)
        script.flush()
        command = [sys.executable, str(SERVER), "--script", script.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                os.environ["OPENAI_API_BASE"] = server.stdout.readline().strip()
                os.environ["OPENAI_API_KEY"] = "none"
                asyncio.run(main("openai/gpt-4o-mini"))
            finally:
                server.terminate()


if __name__ == "__main__":
    if sys.argv[1:] == ["--stand-in"]:
        with_stand_in()
    elif len(sys.argv) == 2:
        asyncio.run(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
