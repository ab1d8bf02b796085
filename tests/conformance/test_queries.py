"""Tests of queries, which code in a sandbox sends to its host and the host to a model, on every provider."""

import asyncio
import hashlib
import importlib
import json
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, LanguageModel
from rlm_batch.blocks.language_model.model_access import ModelAccess
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.result import Result

from ..infra.scripted_turns import make_script
from ..infra.waiting import HANG_SECONDS, wait_until_async
from ..standins.openai_chat import ChatServer, Reply
from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

KEY = "sk-of-the-tests-9c41e7d2"
THREE = ["Summarise chunk one", "Summarise chunk two", "Summarise chunk three"]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the modules that a process's first query needs, before the timeout of a test starts."""
    importlib.import_module("litellm")


def model(chat: ChatServer, **settings: Any) -> LanguageModel:
    """Return a language model whose requests go to the chat server."""
    defaults = {"model": "openai/gpt-4o-mini", "api_key": KEY, "api_base": chat.url, "retries": 0}
    return LanguageModel(**{**defaults, **settings})


async def ask(
    provider: SandboxProvider, chat: ChatServer, code: str, variables: dict[str, Any] | None = None, **limits: Any
) -> Result:
    """Run code that may query the server's model, and return its result."""
    access = ModelAccess(model=model(chat), **limits)
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        return await interpreter.execute(dedent(code), variables, queries=access.queries(interpreter))


async def test_three_prompts_run_concurrently_and_answers_keep_their_order(provider: SandboxProvider, chat: ChatServer):
    for prompt, delay in zip(THREE, (0.06, 0.04, 0.02), strict=True):
        chat.rule(prompt, Reply(f"summary of {prompt.split()[-1]}", delay=delay, gate=3))
    code = """
        summaries = rlm_query_batched(prompts, concurrency=3)
        SUBMIT(summaries=summaries)
        """
    chat.script = make_script(*((prompt, f"SUBMIT(answer=llm_query({prompt!r}))") for prompt in THREE))
    result = await ask(provider, chat, code, {"prompts": THREE}, batch_concurrency=3)
    assert result.summaries == ["summary of one", "summary of two", "summary of three"]
    assert chat.stats.most_at_once == 3
    flat = await ask(provider, chat, code.replace("rlm", "llm"), {"prompts": THREE}, batch_concurrency=3)
    assert flat.summaries == result.summaries


async def test_concurrent_queries_stay_within_the_limits_of_code_and_host(provider: SandboxProvider, chat: ChatServer):
    code = "SUBMIT(answers=llm_query_batched([str(i) for i in range(8)], concurrency=asked))"
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        for asked, cap, seen in ((16, 2, 2), (3, 8, 3), (None, 4, 4)):
            chat.script = lambda request, seen=seen: Reply(request.messages[-1], delay=0.05, gate=seen)
            queries = ModelAccess(model=model(chat), batch_concurrency=cap).queries(interpreter)
            result = await interpreter.execute(code, {"asked": asked}, queries=queries)
            assert result.answers == [str(i) for i in range(8)]
            assert chat.stats.most_at_once == seen


async def test_six_of_eight_answers_are_kept_when_two_prompts_fail(provider: SandboxProvider, chat: ChatServer):
    chat.rule("bad", Reply("this prompt is refused", status=400))
    chat.rule("prompt 3", "Error: this is what I answer")
    code = """
        prompts = [f"bad {i}" if i in (2, 5) else f"prompt {i}" for i in range(8)]
        try:
            llm_query_batched(prompts)
        except QueryError as error:
            raised = [str(error), error.results, {i: repr(e) for i, e in error.errors.items()}]
        returned = llm_query_batched(prompts, on_error="return")
        SUBMIT(
            raised=raised[0],
            results=list(map(list, raised[1].items())),
            errors=list(map(list, raised[2].items())),
            answers={str(i): a for i, a in enumerate(returned) if isinstance(a, str)},
            objects={str(i): [type(a).__name__, str(a)] for i, a in enumerate(returned) if not isinstance(a, str)},
        )
        """
    result = await ask(provider, chat, code)
    six = {i: "Error: this is what I answer" if i == 3 else f"answer to: prompt {i}" for i in (0, 1, 3, 4, 6, 7)}
    assert dict(map(tuple, result.results)) == six
    assert [index for index, _ in result.errors] == [2, 5]
    assert all("QueryError" in text and "this prompt is refused" in text for _, text in result.errors)
    assert result.raised.startswith(
        "2 of 8 queries failed, first number 2: the model openai/gpt-4o-mini did not answer"
    )
    assert result.answers == {str(i): text for i, text in six.items()}
    assert {index: kind for index, (kind, _) in result.objects.items()} == {"2": "QueryError", "5": "QueryError"}


async def test_wrong_arguments_raise_in_the_code_and_reach_no_model(provider: SandboxProvider, chat: ChatServer):
    code = """
        def said(call):
            try:
                return ["returned", call()]
            except Exception as error:
                return [type(error).__name__, str(error)]
        SUBMIT(said=[
            said(lambda: llm_query_batched([])), said(lambda: rlm_query_batched([])),
            said(lambda: llm_query_batched(["a"], concurrency=0)),
            said(lambda: rlm_query_batched([], concurrency=-1)),
            said(lambda: llm_query_batched("abc")), said(lambda: llm_query_batched(["a", 1])),
            said(lambda: llm_query(None)), said(lambda: llm_query_batched(["a"], on_error="ignore")),
            said(lambda: rlm_query("a", context=b"x")), said(lambda: llm_query()),
        ])
        """
    said = (await ask(provider, chat, code)).said
    assert said[:2] == [["returned", []]] * 2
    assert [kind for kind, _ in said[2:]] == [
        "ValueError", "ValueError", "TypeError", "TypeError", "TypeError", "ValueError", "TypeError", "TypeError"
    ]  # fmt: skip
    assert "concurrency is 0" in said[2][1]
    assert chat.stats.requests == 0


async def test_a_query_below_the_deepest_level_raises_depth_exceeded(provider: SandboxProvider, chat: ChatServer):
    """Check three nested recursive models, with one request to the model at a time."""
    bottom = """
        try:
            said = rlm_query("level four")
        except DepthExceeded as error:
            said = str(error)
        SUBMIT(answer="three " + llm_query("flat") + " " + said)
        """
    chat.script = make_script(
        ("level three", bottom),
        ("level two", "SUBMIT(answer='two ' + rlm_query('level three'))"),
        ("level one", "SUBMIT(answer='one ' + rlm_query('level two', context=context.upper()))"),
    )
    code = "SUBMIT(answer=rlm_query('level one', context='a text'))"
    result = await ask(provider, chat, code, batch_concurrency=1, max_depth=3)
    assert result.answer.startswith("one two three answer to: flat a recursive query here would have depth 4")
    assert chat.stats.requests == 4
    assert chat.stats.most_at_once == 1
    (one,) = result.meta.queries.tree
    (two,) = one["queries"]
    (three,) = two["queries"]
    four, flat = three["queries"]
    assert [query["depth"] for query in (one, two, three, flat)] == [1, 2, 3, 4]
    assert four["error"].startswith("DepthExceeded")
    assert (four["calls"], flat["calls"], result.meta.queries.failed) == (0, 1, 1)


async def test_turns_share_state_and_the_model_sees_errors(provider: SandboxProvider, chat: ChatServer):
    chat.script = make_script(
        ("ZeroDivisionError", "SUBMIT(answer=str(n + len(context)))"),
        ("Turns left: 19.", "print('n is', n)\n1 / 0"),
        ("", "n = 7"),
    )
    result = await ask(provider, chat, "n = 1; SUBMIT(answer=rlm_query('how many?', context='x' * 100_000), n=n)")
    assert (result.answer, result.n) == ("100007", 1)
    (query,) = result.meta.queries.tree
    assert [turn["code"].splitlines()[0] for turn in query["trajectory"]] == [
        "n = 7", "print('n is', n)", "SUBMIT(answer=str(n + len(context)))"
    ]  # fmt: skip
    assert "n is 7" in query["trajectory"][1]["output"]
    assert "ZeroDivisionError" in query["trajectory"][1]["output"]


async def test_code_gets_the_whole_context_and_prompts_do_not_contain_it(provider: SandboxProvider, chat: ChatServer):
    chat.script = make_script(("", "import hashlib; SUBMIT(answer=hashlib.sha256(context.encode()).hexdigest())"))
    code = """
        import hashlib
        context = "a\\r\\nb" + "é\\u2028" * 50_000 + "line\\r\\n" * 300_000
        SUBMIT(sum=hashlib.sha256(context.encode()).hexdigest(), answer=rlm_query("sum?", context=context))
        """
    result = await ask(provider, chat, code)
    assert result.answer == result.sum
    assert chat.stats.longest_prompt < 20_000


async def test_concurrent_threads_stay_within_the_call_limit(provider: SandboxProvider, chat: ChatServer):
    chat.script = lambda request: Reply("an answer", gate=3)
    code = """
        from concurrent.futures import ThreadPoolExecutor
        def one(i):
            try:
                return llm_query(f"question {i}")
            except BudgetExceeded as error:
                return [str(error)]
        with ThreadPoolExecutor(20) as pool:
            SUBMIT(answers=list(pool.map(one, range(20))))
        """
    result = await ask(provider, chat, code, max_llm_calls=10)
    answered = [answer for answer in result.answers if isinstance(answer, str)]
    refused = [answer for answer in result.answers if not isinstance(answer, str)]
    assert (len(answered), len(refused)) == (10, 10)
    assert "all 10 calls" in refused[0][0]
    assert chat.stats.requests == 10
    assert chat.stats.most_at_once >= 3
    queries = result.meta.queries
    assert (queries.asked, queries.failed, queries.calls) == (20, 10, 10)
    assert (queries.prompt_tokens, queries.completion_tokens) == (
        chat.stats.prompt_tokens,
        chat.stats.completion_tokens,
    )
    assert queries.cost == pytest.approx(chat.stats.prompt_tokens * 1.5e-7 + chat.stats.completion_tokens * 6e-7)


@pytest.mark.full
async def test_a_query_ends_before_the_codes_timeout_so_code_can_submit(provider: SandboxProvider, chat: ChatServer):
    chat.rule("slow", Reply("too late", delay=1000))
    chat.script = make_script(("", "llm_query('slow')"))
    code = """
        import threading
        answers = []
        def ask():
            answers.extend(llm_query_batched(["quick", "slow"], on_error="return"))
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            rlm_query("x")
        except DeadlineExceeded:
            asking.join()
            SUBMIT(answers=[a if isinstance(a, str) else type(a).__name__ for a in answers], late=True)
        """
    access = ModelAccess(model=model(chat))
    async with provider.interpreter(timeout=20) as interpreter:  # seconds; queries end one second earlier
        result = await interpreter.execute(dedent(code), queries=access.queries(interpreter))
        assert result.answers == ["answer to: quick", "DeadlineExceeded"]
        assert result.late


async def test_no_query_is_sent_after_the_code_has_ended(provider: SandboxProvider, chat: ChatServer):
    """Check that fifty queries end with their code.

    Otherwise the host would continue to send them, two at a time, during the queries of the next execution.
    """
    chat.script = make_script(("", "llm_query_batched([str(i) for i in range(50)])"))
    chat.rule("fence", "over")
    chat.delay = 0.1
    access = ModelAccess(model=model(chat), batch_concurrency=2)

    def count() -> int:
        return sum("fence" not in request.text for request in chat.requests)

    async def check_end(interpreter: Interpreter, execution: asyncio.Task[Result], end: Callable[[], object]) -> None:
        before = count()
        await wait_until_async(lambda: count() >= before + 3, "queries of the code")
        end()
        await asyncio.wait([execution])
        at_the_end = count()
        fences = "SUBMIT([llm_query('fence') for _ in range(5)])"
        assert (await interpreter.execute(fences, queries=access.queries(interpreter))).output == ["over"] * 5
        assert count() <= at_the_end + 2, "no more than the two that were on their way"

    may_submit = Gate()
    async with provider.interpreter(timeout=HANG_SECONDS, tools={"wait": may_submit}) as interpreter:

        def start(code: str) -> asyncio.Task[Result]:
            return asyncio.ensure_future(interpreter.execute(dedent(code), queries=access.queries(interpreter)))

        submitting = """
            import threading
            threading.Thread(target=rlm_query, args=("x",)).start()
            wait()
            SUBMIT(1)
            """
        execution = start(submitting)
        await check_end(interpreter, execution, may_submit.open)
        assert execution.result().output == 1
        execution = start("rlm_query('x')")
        await check_end(interpreter, execution, execution.cancel)


@pytest.mark.every_provider
async def test_the_key_is_nowhere_in_the_sandbox(provider: SandboxProvider, chat: ChatServer):
    """Check the sandbox's memory and files for the key; the code knows only the key's hash."""
    chat.rule("refuse", Reply(f"Incorrect API key provided: {KEY}", status=401))
    code = """
        import glob, hashlib, re
        answer = llm_query("a question")
        try:
            llm_query("refuse")
        except QueryError as error:
            said = str(error)
        def has(data):
            return any(
                hashlib.sha256(data[match.start() : match.start() + length]).hexdigest() == digest
                for match in re.finditer(b"sk-", data)
            )
        found = [said] if has(said.encode()) else []
        looked = 0
        for path in glob.glob("/proc/self/environ") + glob.glob("**", recursive=True) + glob.glob("/tmp/**"):
            try:
                with open(path, "rb") as file:
                    found += [path] if has(file.read()) else []
            except OSError:
                pass
        try:
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
                for line in maps:
                    start, end = (int(word, 16) for word in line.split()[0].split("-"))
                    if "rw" in line and end - start < 1 << 27:
                        memory.seek(start)
                        data = memory.read(end - start)
                        looked += len(data)
                        found += [line] if has(data) else []
        except PermissionError:
            looked = None  # code on this provider cannot even read its own memory so
        SUBMIT(answer=answer, said=said, found=found, looked=looked)
        """
    variables = {"digest": hashlib.sha256(KEY.encode()).hexdigest(), "length": len(KEY)}
    result = await ask(provider, chat, code, variables)
    assert result.answer == "answer to: a question"
    assert "Error code: 401" in result.said
    assert result.found == []
    assert result.looked is None or result.looked > 1_000_000
    assert KEY not in json.dumps(result.outputs)
    assert chat.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_tools_and_queries_work_together_and_queries_need_a_model(provider: SandboxProvider, chat: ChatServer):
    access = ModelAccess(model=model(chat))
    tools = {"double": lambda n: 2 * n, "llm_query": lambda _: "not this one"}
    async with provider.interpreter(tools=tools) as interpreter:
        code = "SUBMIT(double=double(4), answer=llm_query('x'))"
        result = await interpreter.execute(code, queries=access.queries(interpreter))
        assert result.outputs == {"double": 8, "answer": "answer to: x"}
        with pytest.raises(ConfigurationError, match="has the name of a function"):
            await interpreter.execute("1", {"llm_query": 1}, queries=access.queries(interpreter))
        interpreter.tools.clear()
        with pytest.raises(CodeError, match="llm_query needs a model: set `language_model`"):
            await interpreter.execute("llm_query('x')")


async def test_code_that_sends_invalid_queries_gets_an_error(provider: SandboxProvider, chat: ChatServer):
    """Check calls that bypass our functions: the host trusts no data from the code's process."""
    code = """
        import gc, types
        gc.unfreeze()
        call = next(o for o in gc.get_objects() if isinstance(o, types.MethodType) and o.__name__ == "call_host")
        said = []
        for args in ((), (5,), (None,), ([1, None, {}],), (["x"],)):
            for more in ({}, {"concurrency": "many"}, {"concurrency": -5}, {"context": {"path": 7}}, {"x": 1}):
                for name in ("llm_query", "rlm_query_batched", "nosuch"):
                    try:
                        call(name, args, more)
                    except Exception as error:
                        said.append(type(error).__name__)
        SUBMIT(count=len(said), answer=llm_query("still there"))
        """
    chat.script = make_script(("", "SUBMIT(answer='x')"))
    result = await ask(provider, chat, code)
    assert result.answer == "answer to: still there"
    assert result.count > 50
