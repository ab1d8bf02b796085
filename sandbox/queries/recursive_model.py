"""A recursive language model: it answers a question by writing Python. The code runs in a sandbox and can ask models.

The model sees the question and the output of its code. It never sees the whole context, which is a variable of the
code. The method is from Zhang, Kraska and Khattab, "Recursive Language Models" (2025).
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..cancellation import run_shielded
from ..errors import CodeCrashed, CodeError, ExecutionTimeout, QueryError, StateLost, SubmitError
from .events import TurnWatch
from .session import EmptyAnswerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..interpreter import Interpreter
    from ..result import Result
    from .answer_type import AnswerType
    from .recursion import Queries, QueryContext
    from .session import Message, Query

OUTPUT_CHARACTERS = 10_000  # characters of a turn's output that the model sees and the trajectory keeps
PREVIEW_CHARACTERS = 500  # characters of the context that the model sees before its first turn
# A fence opens with three or more backticks or tildes and a language. `split_reply` says how it closes.
OPENING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")
MAX_FENCE_DEPTH = 3  # fences within fences
PYTHON_LANGUAGES = {"", "python", "python3", "py", "py3", "repl", "ipython", "tool_code"}
OUTPUT_FIELDS = [{"name": "answer"}]  # one field of any type

INSTRUCTIONS = """\
You answer a question by writing Python, which runs in a sandbox. After each of your replies you see what the code
printed, and then write the next piece. Reply with a short plan and one block of code:

```python
print(len(context))
```

The code finds these names:
{names}
Names persist from turn to turn. {network} Print what you need to see: more than {output:,} characters are cut, and the
value of a last line that is an expression is shown too.

- Look at the data before you process it: its type, its length, some samples.
- Work in small steps. Use code to find and count, and llm_query to understand text.
- Pass long texts on as variables. Do not print or retype them.
- Check a result before you submit it. SUBMIT ends your work at once, so call it after you have seen the result.
"""
LLM_NAMES = """\
- `llm_query(prompt)` asks a model and returns its answer as text. The model sees the prompt alone, of up to some
  500,000 characters.
- `llm_query_batched(prompts, concurrency=None, on_error="raise")` asks many prompts at once, which is much faster, and
  returns the answers in their order. With on_error="return", an exception object stands where a query failed."""
RLM_NAMES = """
- `rlm_query(prompt, context=value)` asks a recursive model with its own Python, which finds the value as `context`.
  Use it for a part that is itself too long or too intricate for one prompt. `rlm_query_batched(prompts, context=value)`
  asks several."""
NO_RLM = "\n- `rlm_query` raises DepthExceeded here: there is no deeper recursion."
SUBMIT_NAME = """
- `SUBMIT(answer)` ends your work with this answer, of any type that JSON has."""
ERROR_NAMES = """
- A query that fails raises QueryError, BudgetExceeded, DepthExceeded or DeadlineExceeded. The error of a batch has
  `.results` and `.errors` by index."""
NO_CODE = (
    "Your reply has no block of Python, so nothing was run. Write code in a block that begins with ```python and ends "
    "with ```. When you have the answer, call SUBMIT(answer) in it."
)
NO_OUTPUT = "(The code printed nothing.)"
LOST_NAMES = "The process of your code ended, so its names are gone, except for `context`. Define again what you need."
LAST_CALL = (
    "You have no turns left. Reply with the answer to the question alone, as far as you know it: no plan and no code."
)


@dataclass(frozen=True, slots=True)
class RecursionSettings:
    """The settings of recursive models.

    Args:
        max_turns: Maximum number of replies with code. After the last one, the model must reply with only the answer.
        max_errors: Number of consecutive turns without code, or with failing code, that ends the query with a
            QueryError; None for no limit.
        instructions: Text that is added to the model's instructions.
        system_prompt: Text in the place of the built-in instructions; "" for those.
        answer_type: Type of the answers to queries of plain code; None for any JSON value.
        on_depth: "error" to refuse a recursive query beyond the greatest depth, or "plain" to ask the model once.
        compact_tokens: Tokens of a prompt from which the earlier turns are summarized; None for never.
    """

    max_turns: int = 20
    max_errors: int | None = None
    instructions: str = ""
    system_prompt: str = ""
    answer_type: AnswerType | None = None
    on_depth: Literal["error", "plain"] = "error"
    compact_tokens: int | None = None


DEFAULT_RECURSION = RecursionSettings()


async def answer(
    interpreter: Interpreter,
    settings: RecursionSettings,
    queries: Queries,
    prompt: str,
    context: QueryContext,
    query: Query,
) -> Any:
    """Return a recursive model's answer to the prompt, as a JSON value.

    Args:
        interpreter: The sandbox of the asking code. The model's code runs in a separate context of this sandbox.
        settings: The limits and the instructions.
        queries: The query functions for the model's code.
        prompt: The question.
        context: The value of the variable `context` in the model's code.
        query: The query's record. Each turn is added to its trajectory when the turn begins.

    Raises:
        QueryError, BudgetExceeded, DeadlineExceeded: There is no answer.
    """
    session, python = queries.session, _Python(interpreter, queries, context)
    messages: list[Message] = [
        {"role": "system", "content": _write_instructions(interpreter, settings, queries, context)},
        {"role": "user", "content": _write_question(prompt, context)},
    ]
    errors = 0
    try:
        for number in range(1, settings.max_turns + 1):
            turn: dict[str, Any] = {"reasoning": "", "code": "", "output": ""}
            query.trajectory.append(turn)
            watch = TurnWatch(query, session.emit)
            try:
                reply = await session.ask(session.root_model, messages, query)
                turn["usage"] = asdict(reply.usage)
                turn["reasoning"], blocks = split_reply(reply.text)
                turn["code"] = "\n\n".join(blocks)
                watch.emit_code()
                result = await python.run_turn(blocks, turn)
                if result is not None and result.meta.submitted:
                    return result["answer"]
                content = f"{turn['output'] or NO_OUTPUT}\n\nTurns left: {settings.max_turns - number}."
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": content}]
            except EmptyAnswerError as error:
                turn |= {"output": str(error), "failed": True, "usage": asdict(error.usage)}
            except BaseException:
                if "usage" not in turn:
                    query.trajectory.pop()  # There was no reply.
                raise
            finally:
                if "usage" in turn:
                    watch.emit_end()
            errors = errors + 1 if turn.get("failed") else 0
            if errors == settings.max_errors:
                raise QueryError(
                    f"the recursive model failed in {errors} turns in a row (max_errors): {turn['output']}"
                )
        turn = {"reasoning": "", "code": "", "output": ""}
        query.trajectory.append(turn)
        watch = TurnWatch(query, session.emit)
        try:
            reply = await session.ask(session.root_model, [*messages, {"role": "user", "content": LAST_CALL}], query)
        except BaseException:
            query.trajectory.pop()  # There was no reply.
            raise
        turn |= {"reasoning": reply.text, "usage": asdict(reply.usage)}
        watch.emit_code()
        watch.emit_end()
        return reply.text.strip()
    finally:
        await run_shielded(python.close())


class _Python:
    """The Python of one recursive model: a context of the sandbox, created again if its process ends."""

    def __init__(self, interpreter: Interpreter, queries: Queries, context: QueryContext) -> None:
        self._interpreter, self._queries, self._context = interpreter, queries, context
        self._name = ""

    async def run_turn(self, blocks: list[str], turn: dict[str, Any]) -> Result | None:
        """Run the blocks in order until one fails or submits, and record the output in the turn.

        Return the last result, or None if a block failed or there are no blocks. Raises the errors of `run`.
        """
        result = None
        if not blocks:
            turn |= {"output": NO_CODE, "failed": True}
        for block in blocks:
            output, result = await self.run(block)
            turn["output"] = shorten("\n".join(filter(None, (turn["output"], output))))
            if result is None:
                turn["failed"] = True
                break
            if result.meta.submitted:
                turn["output"] = shorten(f"{turn['output']}\nFINAL: {result['answer']!r}".lstrip("\n"))
                break
        return result

    async def run(self, code: str) -> tuple[str, Result | None]:
        """Run a block. Return the text that the model sees, and the result, or None if the code failed.

        Raises RlmBatchError if the sandbox is lost, or the time is over.
        """
        lost = ""
        try:
            if not self._name:
                await self._start()
            result = await self._execute(code)
        except (CodeError, SubmitError, ExecutionTimeout, StateLost) as error:
            self._queries.session.check_seconds_left()
            if isinstance(error, (CodeCrashed, StateLost)):
                await self.close()
                lost = LOST_NAMES
            printed = "" if error.meta is None else error.meta.stdout
            return "\n".join(filter(None, (printed.rstrip("\n"), str(error), lost))), None
        meta = result.meta
        value = meta.value_repr if meta.value is None else repr(meta.value)
        return "\n".join(filter(None, ((meta.stdout + meta.stderr).rstrip("\n"), value))), result

    async def close(self) -> None:
        """End the context and its process."""
        if self._name:
            await self._interpreter.forget_context(self._name)
            self._name = ""

    async def _start(self) -> None:
        self._name = f"rlm-{uuid.uuid4().hex[:12]}"
        context = self._context
        try:
            if context.path:
                read = "json.load(_file)" if context.is_json else "_file.read()"
                opened = f"open({context.path!r}, encoding='utf-8', errors='surrogatepass', newline='')"
                await self._execute(f"import json\nwith {opened} as _file:\n    context = {read}\ndel _file, json")
            elif context.shape:
                parse = "import json\ncontext = json.loads(context)\ndel json" if context.is_json else "pass"
                await self._execute(parse, {"context": context.text})
        except CodeError as error:  # Without the context, further turns would be wasted money.
            await self.close()
            raise QueryError(f"the context of the recursive query cannot be read: {error.summary}") from error

    async def _execute(self, code: str, variables: dict[str, Any] | None = None) -> Result:
        left = self._queries.session.check_seconds_left()
        return await self._interpreter.execute(
            code,
            variables,
            timeout=math.inf if left is None else left,
            context=self._name,
            output_fields=OUTPUT_FIELDS,
            queries=self._queries,
            index=self._queries.numbers,
            refuse_exit=True,
        )


def split_reply(reply: str, depth: int = MAX_FENCE_DEPTH) -> tuple[str, list[str]]:
    """Return a model's reply without its fenced blocks, and the blocks of Python in their order.

    A closing fence has at least as many characters as the opening one. It is on its own line or, as some models write
    it, at the end of the last line of code. The run time is linear in the length of any reply.
    """
    text: list[str] = []
    blocks: list[str] = []
    lines = iter(reply.split("\n"))
    for line in lines:
        opening = OPENING.match(line)
        if opening is None or "`" in line[opening.end() :]:  # Backticks that close on the same line are no fence.
            text.append(line)
            continue
        marker, language = opening.groups()
        content = "\n".join(_take_content(lines, marker))
        if content.lstrip().startswith(("```", "~~~")):  # a fence around other fences
            blocks += split_reply(content, depth - 1)[1] if depth > 1 else []
        elif language.lower() in PYTHON_LANGUAGES and content.strip():
            blocks.append(textwrap.dedent(content).strip("\n"))
    return "\n".join(text).strip(), blocks


def _take_content(lines: Iterator[str], marker: str) -> Iterator[str]:
    """Yield the lines of a block. If the block has a closing fence, consume the fence."""
    for line in lines:
        stripped = line.rstrip(" \t\r")
        closing = stripped.find(marker, len(stripped.rstrip("`~")))
        yield line if closing < 0 else stripped[:closing]
        if closing >= 0:
            return


def shorten(text: str) -> str:
    """Return the text, or its beginning and its end if it has more than OUTPUT_CHARACTERS."""
    if len(text) <= OUTPUT_CHARACTERS:
        return text
    half = OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _write_instructions(
    interpreter: Interpreter, settings: RecursionSettings, queries: Queries, context: QueryContext
) -> str:
    names = [f"- `context`: {context.shape}."] if context.shape else []
    names.append(LLM_NAMES + (RLM_NAMES if queries.depth < queries.max_depth else NO_RLM) + ERROR_NAMES)
    names += [_describe_tool(name, tool) for name, tool in interpreter.tools.items() if name not in queries.tools]
    network = "It can open connections to the network." if interpreter.sandbox.has_network else "It has no network."
    text = INSTRUCTIONS.format(names="\n".join(names) + SUBMIT_NAME, network=network, output=OUTPUT_CHARACTERS)
    calls = queries.session.budget.remaining_calls
    limit = "" if calls is None else f", and at most {calls} calls of models in all, your own turns included"
    added = f"\n\n{settings.instructions}" if settings.instructions else ""
    return f"{text}\nYou have {settings.max_turns} turns{limit}.{added}"


def _describe_tool(name: str, tool: Any) -> str:
    try:
        signature = str(_hide_defaults(inspect.signature(tool))).replace("Ellipsis", "...")
    except (TypeError, ValueError):
        signature = "(...)"
    purpose = (inspect.getdoc(tool) or "").partition("\n")[0]
    return f"- `{name}{signature}`" + (f": {purpose}" if purpose else "")


def _hide_defaults(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with `...` for defaults other than numbers and None: a `partial` may hold a secret."""
    parameters = [
        parameter
        if parameter.default is parameter.empty or isinstance(parameter.default, (int, float, type(None)))
        else parameter.replace(default=...)
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


def _write_question(prompt: str, context: QueryContext) -> str:
    if not context.shape:
        return prompt
    preview = context.preview[:PREVIEW_CHARACTERS]
    return f"{prompt}\n\n`context` is {context.shape}. It begins:\n{preview}"
