"""Replies in the manners of ten families of models: what runs, what is told, and that nothing runs from a thought."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rlm_batch import open_rlm
from rlm_batch.sandbox.model_reply import read_program, read_reply, split_thoughts

from ..standins.openai_chat import ChatServer, Reply

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"
PLAN = "\nI could write\n```python\nSUBMIT('draft')\n```\nbut that is wrong.\n"
FAMILIES = {
    "deepseek": f"<think>{PLAN}</think>\n\n",
    "qwen": f"{PLAN}</think>\n\n",  # Its prompt has the opening tag.
    "claude": f"<thinking>{PLAN}</thinking>\n",
    "mistral": f"[THINK]{PLAN}[/THINK]",
    "seed": f"<seed:think>{PLAN}</seed:think>",
    "kimi": f"◁think▷{PLAN}◁/think▷",
    "cohere": f"<|START_THINKING|>{PLAN}<|END_THINKING|>",
    "gpt-oss": f"<|channel|>analysis<|message|>{PLAN}<|end|><|start|>assistant<|channel|>final<|message|>",
    "gemini": f"<thought>\nA <think> tag, then:\n{PLAN}</thought>\n",
    "llama": "",
}
MANNERS = {
    "fences": "Here's the code:\n\n```python\n{}\n```\nDone.",
    "no language": "```\n{}\n```",
    "a list": "1. Run it:\n\n   ~~~py3\n   {}\n   ~~~",
    "other languages": '```bash\nls -la\n```\n```json\n{{"a": 1}}\n```\n```{{.python}}\n{}\n```',
    "XML": "<execute>\n{}\n</execute>",
    "JSON": '{{"name": "python", "arguments": {{"code": {}}}}}',
}
MADE_UP = "**Output:** 3"
CONTENTS = {
    "one block": ["SUBMIT('final')"],
    "two blocks": ["word = 'fin'", "SUBMIT(word + 'al')"],
    "a fence in a string": ["text = '''\n```\n<think>\n'''\nSUBMIT('final' if text.count('\\n') == 3 else text)"],
    "a made-up output": ["word = 'seen'", MADE_UP, "SUBMIT('made up')"],
    "no code": [],
}


def write_reply(family: str, manner: str, content: str) -> str:
    """Return a reply of a model."""
    parts = CONTENTS[content] or ["I cannot help with that."]
    if manner == "JSON":
        written = [part if part == MADE_UP else MANNERS[manner].format(json.dumps(part)) for part in parts]
    else:
        indent = "\n   " if manner == "a list" else "\n"
        fill = MANNERS[manner].format
        written = [part if part == MADE_UP else fill(part.replace("\n", indent)) for part in parts]
    return FAMILIES[family] + ("\n\n".join(written) if CONTENTS[content] else parts[0])


REPLIES = {names: write_reply(*names) for names in itertools.product(FAMILIES, MANNERS, CONTENTS)}


def expect(manner: str, content: str) -> str:
    """Return what a reply submits, or the beginning of what is told."""
    if manner in ("XML", "JSON") or content == "no code":
        return ""
    return "was not run" if content == "a made-up output" else "final"


class Submitted(BaseException):
    """The end of a program."""


def run(programs: list[str]) -> str:
    """Return what the programs submit, or the text of their error."""

    def submit(value: str) -> None:
        raise Submitted(value)

    names: dict[str, Any] = {"SUBMIT": submit}
    try:
        for program in programs:
            exec(program, names)
    except Submitted as value:
        return str(value)
    except (RuntimeError, SyntaxError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_of_300_replies_nothing_runs_from_a_thought_or_after_a_made_up_output(family: str) -> None:
    assert len(REPLIES) == 300
    for (manner, content), text in ((names[1:], text) for names, text in REPLIES.items() if names[0] == family):
        expected = expect(manner, content)
        program = read_program(text)
        told = run([program])
        assert expected in told, (manner, content)
        assert "draft" not in program
        assert told != "made up", (manner, content)
        rest, thoughts = split_thoughts(text)
        assert ("draft" in thoughts) == bool(FAMILIES[family])
        assert "draft" not in rest
        reply = read_reply(rest)
        blocks = [code for _, code in reply.blocks]
        assert bool(blocks) == bool(expected), (manner, content)
        assert expected in (run(blocks) or reply.reason), (manner, content)


SAMPLE = dict(itertools.islice(REPLIES.items(), 0, None, 23))


@pytest.mark.usefixtures("openai")
async def test_a_recursive_model_runs_what_the_reader_finds(chat: ChatServer) -> None:
    async with open_rlm(NAME, "local:none", max_turns=2) as session:
        for (family, manner, content), text in itertools.islice(SAMPLE.items(), 0, None, 2):
            replies = iter([Reply(text, reasoning="Apart."), "```python\nSUBMIT('second')\n```"])
            chat.script = lambda _request, replies=replies: next(replies)
            expected = expect(manner, content)
            answer = await session.ask("which?")
            assert answer.value == ("final" if expected == "final" else "second"), (manner, content)
            first = answer.trajectory[0]
            assert "draft" not in first["code"]
            assert first["thoughts"].startswith("Apart.")
            assert ("draft" in first["thoughts"]) == bool(FAMILIES[family])
            assert (expected or "no block of Python outside of its thoughts") in first["output"]
    assert "draft" not in chat.requests[-1].text, "thoughts are not sent again"
