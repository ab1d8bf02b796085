"""A recursive model's wrong answer: one of its three sub-answers is wrong, "30" for "3", and the sum is 35 for 8."""

from __future__ import annotations

from ..standins.openai_chat import ChatServer
from .scripted_turns import make_script

QUESTION = "How many orders were late?"
LATE = {2, 4, 7, 8, 10, 11, 13, 15}
ORDERS = "\n".join(
    f"{number:02}: due May {number}, " + (f"arrived May {number + 2}" if number in LATE else "arrived on time")
    for number in range(1, 16)
)
TASK = "How many of these orders were late? Reply with a number."
ASK = f"""
lines = context.splitlines()
groups = ["\\n".join(lines[start:start + 5]) for start in range(0, len(lines), 5)]
answers = llm_query_batched([{TASK!r} + "\\n\\n" + group for group in groups])
late = sum(map(int, answers))
print(late, "of", len(lines), "orders were late")
"""
TURNS = make_script(
    ("Turns left: 18.", "SUBMIT(late)"),
    ("Turns left: 19.", ASK),
    ("", "print(context.count('\\n') + 1, 'lines')\nprint(context[:100])"),
)


def script_wrong_answer(chat: ChatServer) -> None:
    """Make the server's model answer `QUESTION` about `ORDERS` with 35."""
    chat.script = TURNS
    for first_order, answer in (("01:", "2"), ("06:", "3"), ("11:", "30")):
        chat.rule(f"{TASK}\n\n{first_order}", answer)
