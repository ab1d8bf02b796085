"""Tests of reading a model's replies."""

from __future__ import annotations

import pytest

from rlm_batch.sandbox.model_reply import read_program, read_reply, read_value, split_thoughts

FENCE = "```"


def wrap(code: str, tag: str = "python") -> str:
    """Return a fenced block."""
    return f"{FENCE}{tag}\n{code}\n{FENCE}"


DRAFT, FINAL = wrap("SUBMIT('draft')"), wrap("SUBMIT('final')")


def read_blocks(reply: str) -> list[str]:
    """Return the code that is run of a reply, block by block."""
    return [code.strip("\n") for _, code in read_reply(split_thoughts(reply)[0]).blocks]


@pytest.mark.parametrize("language", ["python", "py", "Python3", "repl", "ipython", "tool_code", "PYTHON3.12", ""])
@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fenced_block_is_code_whatever_stands_around_it(fence: str, language: str) -> None:
    reply = read_reply(f"A plan.\n\n{fence}{language}\nprint(1)\n{fence}\nThat is all.")
    assert [code for _, code in reply.blocks] == ["print(1)\n"]
    assert reply.text == "A plan.\n\nThat is all."


@pytest.mark.parametrize(
    ("reply", "blocks"),
    [
        ("```python\na = 1\n```\nand\n```py\nprint(a)\n```", ["a = 1", "print(a)"]),
        ("```python\na = 1\n```\nand\n```\nprint(a)\n```", ["a = 1", "print(a)"]),
        ("```python\nprint(1)", ["print(1)"]),
        ("```python\nprint(1)``", ["print(1)"]),
        ("```python\nprint('1')```\nThat is all.", ["print('1')"]),
        ("Here's the code: ```python\nprint(1)\n```", ["print(1)"]),
        ("```{.python .numberLines}\nprint(1)\n```", ["print(1)"]),
        ("```\n```python\nprint(1)\n```\n```", ["print(1)"]),
        ("````markdown\n```python\nprint(1)\n```\n````", ["print(1)"]),
        ('```python\na = """```json\n1\n```"""\nb(a)\n```', ['a = """```json\n1\n```"""\nb(a)']),
        ('It has a """docstring""":\n```python\nprint(1)\n```', ["print(1)"]),
        ("````markdown\n```python\nprint(1)\n```\n````\n```python\nprint(2)\n```", ["print(2)"]),
        *((f"```python\nprint(1)\n```{tag}", ["print(1)"]) for tag in ("<|im_end|>", "</s>", " </answer>\nDone.")),
        ("1. Look:\n   ```python\n   for x in y:\n       print(x)\n   ```", ["for x in y:\n    print(x)"]),
        ("- ```python\n  print(1)\n  ```\n- done", ["print(1)"]),
        ("````python\ntext = '''\n```\n'''\n````", ["text = '''\n```\n'''"]),
        (
            '```python\na = f"""\n```\n{1}\n```\n"""\nb(a)\n```\nor\n```\nb(2)\n```',
            ['a = f"""\n```\n{1}\n```\n"""\nb(a)', "b(2)"],
        ),
        ("```python\n# ends with ```\nprint(1)\n```", ["# ends with ```\nprint(1)"]),
        ("~~~python\nprint('''\n```\n''')\n~~~", ["print('''\n```\n''')"]),
        ('```json\n{"a": 1}\n```', []),
        ("```bash\nls\n```\n```python\nprint(1)\n```", ["print(1)"]),
        ("```python-repl\n>>> 1\n```\n```pytb\nTraceback\n```", []),
        ("```python\nif True print(1)\n```\nor\n```python\nprint(2)\n```", ["if True print(1)", "print(2)"]),
        ("SUBMIT(1)", []),
        ("```python\r\nprint(1)\r\n```\r\nThat is all.", ["print(1)\r"]),
        ("```x = 1```\n```python\nprint(1)\n```", ["print(1)"]),
        ("Never write ``` in a string.\n```python\nprint(1)\n```", ["print(1)"]),
        ("```python\n\n```", []),
        ("", []),
    ],
)
def test_replies_are_read_leniently(reply: str, blocks: list[str]) -> None:
    assert read_blocks(reply) == blocks


@pytest.mark.parametrize(
    "thought",
    [
        *(f"<{name}>\nplan\n{DRAFT}\n</{name}>" for name in ("think", "thinking", "THINK", "thought", "seed:think")),
        *(f"<{name}>{DRAFT}</{name}>" for name in ("reasoning", "longcat_think", "budget:thinking")),
        *(f"{tag}\n{DRAFT}\n</think>" for tag in ('<think time="3">', '<think source="a/b">', "< think >")),
        f"<think>\n{DRAFT}\n</ think >",
        f"plan\n{DRAFT}</think>",  # The fence is no quote of the tag.
        f"[THINK]{DRAFT}[/THINK]",
        f"[THINKING]\n{DRAFT}\n[/THINKING]",
        f"◁think▷{DRAFT}◁/think▷",
        f"<|START_THINKING|>{DRAFT}<|END_THINKING|>",
        f"<|begin_of_thought|>{DRAFT}<|end_of_thought|>",
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|channel|>final<|message|>",
        f"plan\n{DRAFT}\n</think>",  # The opening tag is in the prompt.
        f"{FENCE}python\nSUBMIT('draft')\n</think>",  # the fence, too
        f"<think>one <think>two</think>\n{DRAFT}\n</think>",
        f"<think>\n<think>\ntwo\n</think>\n{DRAFT}\n</think>",
        f"<think>a</think>\n\n<think>\n{DRAFT}</think>",
        f"<think>I close with `</think>` and '</think>'.\n{DRAFT}</think>",
        f"Well. <think>{DRAFT}</think>",
    ],
)
def test_nothing_of_a_thought_is_code_or_answer(thought: str) -> None:
    assert read_blocks(f"{thought}\n{FINAL}") == ["SUBMIT('final')"]
    rest, kept = split_thoughts(f"{thought}\n\n42\n")
    assert rest.removeprefix("Well. ").strip() == "42"
    assert "draft" in kept
    program = read_program(f"{thought}\n{FINAL}")
    assert program.strip() == "SUBMIT('final')"
    assert program.count("\n") == thought.count("\n") + 2 + 1, "lines keep their numbers"
    assert read_program(f"{thought}SUBMIT('final')").strip().endswith("SUBMIT('final')")


@pytest.mark.parametrize(
    "reply", [f"<think>plan\n{DRAFT}", f"<think>\n<think>\nx</think>\n{DRAFT}", f"a\n{DRAFT}</think>"]
)
def test_a_reply_of_thoughts_alone_is_refused_with_the_reason(reply: str) -> None:
    assert split_thoughts(reply)[0] == ""
    assert "the reply has only thoughts" in read_program(reply)


@pytest.mark.parametrize(
    "text",
    [
        "s = '<think>a</think>'\nSUBMIT(s)",
        'p = """\n<think>\n```python\n1\n```\n"""\nSUBMIT(p)',
        "# </think>\nSUBMIT(re.sub(r'<think>.*?</think>', '', s))",
        "if a[THINK]:\n    pass",
        wrap("s = '''\n<think>a</think>\n'''\nSUBMIT(s)"),
        f"The page:\n{wrap('<think>a</think>', 'html')}",
        "Some models put '<think>' and '</think>' around thoughts, as in `<think>a</think>`.",
        "42 <think>",
        "no thoughts ",
    ],
)
def test_a_tag_in_code_or_data_is_no_thought(text: str) -> None:
    assert split_thoughts(text) == (text, "")
    if FENCE not in text[:3] and "SUBMIT" in text:
        assert read_program(text) == text


@pytest.mark.parametrize("text", ["SUBMIT('a</think>b')", "s = r'<think>.*?</think>'", '{\n "a": "b </think> c"\n}'])
@pytest.mark.parametrize("thought", ["<think>plan</think>\n", "plan\n</think>\n"])
def test_a_tag_in_code_or_data_after_a_thought_is_no_thought(thought: str, text: str) -> None:
    assert split_thoughts(thought + text)[0] == text
    assert read_program(thought + text).strip() == text


@pytest.mark.parametrize(
    "made_up",
    [
        *("**Output:** 3", "Output:\n3", "Observation: it is 3", "[Out]\n3", "Out[1]: 3", "Execution result:\n\n3"),
        *("User: go on", "**User:** 3", "### Result\n3", "<output>3</output>", "<|im_start|>user\n3", "stdout: 3"),
        *(
            "The output is 3.",
            "Console output of the code:\n> 3",
            "(The code printed nothing.)",
            "Turns left: 3.",
            "It prints:\n3",
        ),
        *(
            "Observation 1: 3",
            "Step 1 output: 3",
            "Printed output:\n3",
            "\U0001f4e4 Output: 3",
            "Output = 3",
            "It prints 3.",
        ),
        *(">>> 3", "-> 3", "=> [3]", "Ausgabe: 3", "Sortie : 3", "Resultado:\n3", "Вывод: 3", "执行结果\uff1a3"),
        *("Tool: 3", "<|im_start|>tool\n3", "<|start_header_id|>ipython<|end_header_id|>\n3", "[INST] 3 [/INST]"),
        "<end_of_turn>\n<start_of_turn>user\n3",
        *(wrap("3", tag) for tag in ("output", "text", "", "tool_output", "bash-output", "pycon", "console")),
    ],
)
def test_code_after_an_output_that_the_model_made_up_is_not_run(made_up: str) -> None:
    reply = f"{wrap('print(1)')}\n\n{made_up}\n\nSo it is 3.\n{FINAL}"
    read = read_reply(reply)
    assert [code for _, code in read.blocks] == ["print(1)\n"]
    assert "was not run" in read.reason
    assert FINAL in read.text
    program = read_program(reply)
    assert compile(program, "reply", "exec")
    assert "final" not in program
    assert read_program(f"{made_up}\n{FINAL}").strip() == "SUBMIT('final')", "no code came before"


@pytest.mark.parametrize(
    "between",
    [
        *("Next, I look at the result:", "Result:", "Then I output the sum: it is small.", "This prints the lines."),
        *("The result is `a`, so I submit it.", "Output format: one number", "-> then I submit it", "Tools are next."),
        *("Users are next.", "The output is a list.", wrap("pip install x", "bash"), "Step 2\n---"),
    ],
)
def test_words_between_blocks_are_no_output(between: str) -> None:
    assert read_blocks(f"{wrap('a = 1')}\n{between}\n{FINAL}") == ["a = 1", "SUBMIT('final')"]


def test_a_program_has_all_blocks_of_a_reply_at_their_lines() -> None:
    reply = f"First:\n{wrap('a = 2')}\n1. then\n   {FENCE}py\n   if a:\n       SUBMIT(a)\n   {FENCE}"
    assert read_program(reply) == "\n\na = 2\n\n\n\nif a:\n    SUBMIT(a)\n"


@pytest.mark.parametrize("text", ["[1]", "```json\n[1]\n```", "Here it is:\n~~~\n[1]\n~~~\nDone."])
def test_a_value_may_be_fenced(text: str) -> None:
    assert read_value(text) == "[1]"


@pytest.mark.parametrize(
    "reply",
    [
        "`" * 1_000_000,
        "```" + "a" * 1_000_000,
        "```" + "a" * 1_000_000 + "`",
        "```" + " " * 1_000_000 + "`",
        "~~~ " * 250_000 + "`",
        "```python\n" + "`" * 1_000_000 + "x",
        "```python\n" + "`" * 500_000 + " " * 500_000 + "x",
        "```python\n" + "``` x\n" * 100_000,
        "```a\n" * 100_000,
        "```a\n1\n```\n" * 20_000,
        "'<think> x" * 100_000,
        "<think></think>\n" * 50_000,
        "```python\n<think></think>\n" * 30_000,
        "</think>" * 100_000,
        "Output:\n" * 100_000,
        "````a\n```python\n" * 50_000,
        "````a\n```python\n1\n```\n````\n" * 10_000,
        '<think></think>x = """\n' + "a</think>b\n" * 50_000,
        "```python\n1\n```\n" + " _" * 500_000,
        "```python\n1\n" + "``` <" * 100_000,
    ],
)
@pytest.mark.timeout(60)  # quadratic time would be hours
def test_a_hostile_reply_is_read_in_linear_time(reply: str) -> None:
    assert not any(code.startswith("SUBMIT") for code in read_blocks(reply))
    read_program(reply)
