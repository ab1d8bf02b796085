"""DSPy's interpreter protocol on this project's interpreters, as `dspy.RLM` uses it."""

import asyncio
import math
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel, RootModel, SecretStr

from rlm_batch import InterpreterFactory, LanguageModel, LocalInterpreter
from rlm_batch.sandbox.sandbox_api import Sandbox
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

from ..infra.scripted_turns import DSPY_MARK, FAILING_CHILD, format_dspy_turn, make_script

NAME = "openai/gpt-4o-mini"


@pytest.fixture(autouse=True)
def clean(no_process_left):
    """Check after each test that no process is left."""


@pytest.fixture
def protocol() -> Any:
    """Import and return DSPy's interpreter protocol; the import takes seconds."""
    from dspy.primitives import code_interpreter

    return code_interpreter


@pytest.fixture
def dspy(chat):
    """Return DSPy with the test's server as its language model."""
    import dspy

    with dspy.context(lm=dspy.LM(NAME, api_key="sk-x", api_base=chat.url, cache=False)):
        yield dspy


def factory(**settings):
    return InterpreterFactory(lambda: LocalInterpreter(timeout=500, **settings))


def test_the_interpreter_follows_the_dspy_protocol(protocol):
    make = factory()
    assert isinstance(make.execution_instructions, str)
    interpreter = make()
    assert isinstance(interpreter, protocol.CodeInterpreter)
    try:
        interpreter.start()
        interpreter.start()
        assert interpreter.execute("x = 2") is None
        assert interpreter.execute("print(x + y)", {"y": 3}) == "5\n"
        assert interpreter.execute("print('seen')\n(x, {'z': x == 3})") == [2, {"z": False}]
        assert interpreter.execute("object") == "<class 'object'>"
        assert interpreter.execute("SUBMIT(x)") == protocol.FinalOutput({"output": 2})
        interpreter.tools["double"] = lambda n: 2 * n
        interpreter.output_fields = [{"name": "answer", "type": "int"}]
        assert interpreter.execute("SUBMIT(double(x))") == protocol.FinalOutput({"answer": 4})
        # DSPy itself converts values to the types of its fields, so the interpreter does not.
        for value in ("'4'", "4.0", "True", "[4]"):
            assert repr(interpreter.execute(f"SUBMIT({value})").output["answer"]) == value
        assert interpreter.execute("SUBMIT({1: {None: 2}})") == protocol.FinalOutput({"answer": {"1": {"null": 2}}})
    finally:
        interpreter.shutdown()
        interpreter.shutdown()
    with pytest.raises(protocol.CodeInterpreterError, match="shut down"):
        interpreter.execute("1")


def test_errors_are_recoverable_until_the_state_is_lost(protocol):
    interpreter = factory()()
    try:
        with pytest.raises(SyntaxError):
            interpreter.execute("x = (")
        with pytest.raises(
            protocol.CodeExecutionError, match=r"(?s)seen\nthe code raised ZeroDivisionError \(line 2\)"
        ):
            interpreter.execute("y = 1; print('seen')\n1 / 0")
        with pytest.raises(
            protocol.CodeExecutionError, match=r"(?s)^seen\nTraceback .*\nValueError: of the child\nthe code raised"
        ):
            interpreter.execute(f"print('seen', end='')\n{FAILING_CHILD}")
        assert interpreter.execute("print(y)") == "1\n"
        with pytest.raises(protocol.CodeExecutionError, match="exited with status 3"):
            interpreter.execute("import os; os._exit(3)")
        with pytest.raises(protocol.CodeInterpreterError) as lost:
            interpreter.execute("print(y)")
        assert not isinstance(lost.value, protocol.CodeExecutionError)
    finally:
        interpreter.shutdown()


class Hit(BaseModel):
    number: int
    found: datetime


@dataclass
class Page:
    hits: list[Hit]
    tags: set[str]


class Point(NamedTuple):
    x: float
    y: float


class Unknown:
    def __str__(self) -> str:
        return "something"


HIT = Hit(number=7, found=datetime.fromisoformat("2026-05-14T08:00:00"))
AS_JSON = {"number": 7, "found": "2026-05-14T08:00:00"}


def test_variables_and_tool_results_become_json_as_in_dspys_interpreters(protocol):
    async def look_up(number: int, *, scale: int = 1) -> Page:
        await asyncio.sleep(0)
        return Page([HIT] * number, {"b", "a", str(scale)})

    with factory()() as interpreter:
        variables = {
            "page": Page([HIT], {"b", "a"}), "point": Point(1, 2), "mixed": (1, {3, 2}), "keys": {1: None},
            "array": np.arange(2), "far": math.inf, "root": RootModel[list[int]]([4]),
        }  # fmt: skip
        code = "SUBMIT([page, point, mixed, keys, array, far > 1, root])"
        page = {"hits": [AS_JSON], "tags": ["a", "b"]}
        assert interpreter(code, variables).output["output"] == [
            page, [1, 2], [1, [2, 3]], {"1": None}, [0, 1], True, [4],
        ]  # fmt: skip
        for wrong, message in ((Unknown(), "Unsupported variable x: .*Unknown"), ({(1,): 2}, "a key is a tuple")):
            with pytest.raises(protocol.CodeInterpreterError, match=message) as refused:
                interpreter.execute("1", {"x": wrong})
            assert not isinstance(refused.value, protocol.CodeExecutionError)
        with pytest.raises(protocol.CodeInterpreterError, match=r"Invalid variable name.*\['for'\]"):
            interpreter.execute("1", {"for": 1})

        def fail() -> None:
            raise KeyError("no such page")

        returned = {"point": lambda: {"at": Point(1, 2)}, "unknown": Unknown, "nan": lambda: math.nan, "none": {}.clear}
        interpreter.tools.update(returned | {"look_up": look_up, "fail": fail})
        assert interpreter.execute("SUBMIT(look_up(2, scale=3))").output["output"] == {
            "hits": [AS_JSON, AS_JSON], "tags": ["3", "a", "b"],
        }  # fmt: skip
        assert interpreter.execute("SUBMIT([point(), unknown(), nan(), none()])").output["output"] == [
            {"at": {"x": 1, "y": 2}}, "something", "nan", None,
        ]  # fmt: skip
        with pytest.raises(protocol.CodeExecutionError, match=r"RuntimeError.*KeyError: 'no such page'"):
            interpreter.execute("fail()")


class Recorder:
    """A DSPy callback that records each interpreter event: its name, parent, and inputs or outcome."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.names: dict[str | None, str | None] = {None: None}  # the operations by call ids
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_interpreter_"):
            raise AttributeError(name)
        operation, _, moment = name.removeprefix("on_interpreter_").rpartition("_")
        return partial(self.record, operation, moment)

    def record(self, operation: str, moment: str, *, call_id: str, **event: Any) -> None:
        from dspy.utils.callback_context import ACTIVE_CALL_ID

        with self.lock:
            if moment == "start":
                self.names[call_id] = operation
                self.events.append((operation, self.names[ACTIVE_CALL_ID.get()], event["inputs"]))
            else:
                assert self.names[call_id] == operation
                error = event["exception"]
                self.events.append((operation, event["outputs"] if error is None else error))


def test_dspys_callbacks_see_each_operation_as_for_its_own_interpreters(protocol):
    from dspy import LocalInterpreter as DSPyLocalInterpreter

    hit, refused = Hit(number=1, found=HIT.found), KeyError("no such page")

    async def look_up(number: int) -> Hit:
        await asyncio.sleep(0)
        return hit

    def fail() -> None:
        raise refused

    tools = {"look_up": look_up, "double": lambda n: 2 * n, "fail": fail}
    recorders: tuple[Any, Any] = (Recorder(), Recorder())  # DSPy calls any object with its methods
    interpreters = (
        factory(isolation="none")(tools, callbacks=[recorders[0]]),
        DSPyLocalInterpreter(tools, callbacks=[recorders[1]]),
    )
    for interpreter in interpreters:
        assert interpreter.execute("double(n)", {"n": 2}) == 4
        with pytest.raises(protocol.CodeExecutionError, match="KeyError"):
            interpreter.execute("fail()")
        interpreter.tools["not-valid"] = fail
        with pytest.raises(ValueError, match="'not-valid'"):
            interpreter.execute("1")
        interpreter.shutdown()
        interpreter.shutdown()
        with pytest.raises(protocol.CodeInterpreterError, match="shut down"):
            interpreter.start()
    ours, theirs = ([event for event in recorder.events if len(event) == 3] for recorder in recorders)
    assert ours == theirs
    assert ("startup", "execute", {}) in ours
    assert ("tool_call", "execute", {"tool_name": "double", "args": [2], "kwargs": {}}) in ours
    for recorder in recorders:
        tool_ends = [event[1] for event in recorder.events if len(event) == 2 and event[0] == "tool_call"]
        assert tool_ends == [4, refused]
        ends = [event[1] for event in recorder.events if len(event) == 2 and event[0] == "execute"]
        assert (ends[0], *map(type, ends[1:])) == (4, protocol.CodeExecutionError, ValueError)
    with factory(isolation="none")(tools, callbacks=[recorders[0]]) as interpreter:
        interpreter.execute("look_up(1)")
    assert ("tool_call", hit) in recorders[0].events


@pytest.mark.parametrize("name", ["not-valid", "class", "SUBMIT", "__builtins__"])
def test_names_that_code_cannot_use_are_refused_before_the_sandbox_opens(protocol, name):
    fields = [[{"name": name}], [{"type": "str"}]]
    make = factory()
    with pytest.raises(ValueError, match=rf"tool names.*\['{name}'\]"):
        make(tools={name: print})
    for output_fields in fields[name in ("SUBMIT", "__builtins__") :]:
        with pytest.raises(ValueError, match="output field"):
            make(output_fields=output_fields)

    async def open_sandbox() -> Sandbox:
        raise AssertionError("the sandbox was opened")

    interpreter = InterpreterFactory(lambda: SyncInterpreter(open_sandbox))()
    interpreter.tools["double"] = print
    for variable in (name, "double"):
        with pytest.raises(protocol.CodeInterpreterError, match=rf"Invalid variable name.*\['{variable}'\]"):
            interpreter.execute("1", {variable: 1})
    interpreter.tools[name] = print
    with pytest.raises(ValueError, match="tool names"):
        interpreter.execute("1")


def test_code_that_exits_fails_and_its_session_continues(protocol):
    with factory(isolation="none")() as interpreter:
        for number, (code, name) in enumerate(
            [
                ("import sys; sys.exit(0)", "SystemExit"),
                ("class Stop(BaseException): pass\nraise Stop", "Stop"),
            ]
        ):
            with pytest.raises(protocol.CodeExecutionError, match=name):
                interpreter.execute(f"kept = {number}\n{code}")
            assert interpreter.execute("print(kept)") == f"{number}\n"


def test_dspys_rlm_runs_with_its_model_tools_and_sub_agents(chat, dspy):
    def population(city: str) -> int:
        """Return how many people live in a city."""
        return {"Ghent": 265_000}[city]

    chat.rule("Which city", "Ghent")
    chat.script = make_script(
        ("265000", "SUBMIT(answer=f'{city}: {people}')"),
        ("", "import dspy\ncity = llm_query('Which city is it?')\npeople = population(city)\nprint(people)"),
        is_dspy=True,
    )
    rlm = dspy.RLM("context, query -> answer", tools=[population], interpreter_factory=factory())
    answer = rlm(context="a text", query="how many?")
    assert answer.answer == "Ghent: 265000"
    assert len(answer.trajectory) == 2


@pytest.mark.full
def test_gepa_improves_the_prompt_of_a_recursive_model_with_eight_threads(chat, dspy):
    """Each rollout has a sandbox of its own, and at most eight are open."""
    opened, open_now, most = [], set(), []

    class Counted(LocalInterpreter):
        def start(self):
            if self not in open_now:
                opened.append(self)
                open_now.add(self)
                most.append(len(open_now))
            return super().start()

        def shutdown(self):
            super().shutdown()
            open_now.discard(self)

    def script(request):
        if "new_instruction" in request.text:
            return '{"new_instruction": "Count the words, and ADD ONE."}'
        if DSPY_MARK not in request.text:
            return "seen"
        if "seen" in request.messages[-1]:
            return format_dspy_turn(f"SUBMIT(answer=str(n + {int('ADD ONE' in request.text)}))")
        return format_dspy_turn("n = len(context.split())\nprint(n, llm_query('a word?'))")

    def judge(example, prediction, *_):
        return dspy.Prediction(score=float(prediction.answer == example.answer), feedback="One more is right.")

    def make_example(count):
        texts = {"context": "w " * count, "query": "How many words, and one?", "answer": str(count + 1)}
        return dspy.Example(texts).with_inputs("context", "query")

    chat.script, chat.delay = script, 0.05
    rlm = dspy.RLM("context, query -> answer", interpreter_factory=InterpreterFactory(Counted))
    optimizer = dspy.GEPA(
        metric=judge, max_metric_calls=60, num_threads=8, reflection_lm=dspy.settings.lm, track_stats=True
    )
    train, validation = [make_example(count) for count in range(3, 9)], [make_example(count) for count in range(9, 21)]
    best = optimizer.compile(rlm, trainset=train, valset=validation)
    assert best.detailed_results.val_aggregate_scores == [0.0, 1.0]
    assert best(context="a b c", query="How many words, and one?").answer == "4"
    assert len(opened) >= 60
    assert max(most) == 8
    assert not open_now


@pytest.mark.full
def test_arguments_by_position_reach_tools_that_dspy_has_wrapped(protocol, dspy):
    def find(table: str, limit: int = 3, *, order: str = "up", **filters: Any) -> str:
        return f"{table} {limit} {order} {filters}"

    async def find_later(table: str, *, order: str = "up") -> str:
        return f"{table} {order}"

    rlm = dspy.RLM("query -> answer", tools=[find, find_later], interpreter_factory=factory())
    with factory()() as interpreter:
        interpreter.tools.update(rlm._prepare_execution_tools())
        assert interpreter.execute("find('a')") == "a 3 up {}"
        assert interpreter.execute("find('a', 4, order='down', city='Ghent')") == "a 4 down {'city': 'Ghent'}"
        assert interpreter.execute("find_later('a', order='down')") == "a down"
        with pytest.raises(protocol.CodeExecutionError, match="too many positional arguments"):
            interpreter.execute("find('a', 4, 'down')")


def test_a_language_model_keeps_our_queries_and_refuses_calls_outside_the_budget(chat, dspy):
    """DSPy passes its own `llm_query`, and a module `dspy` whose models would not count in the budget."""
    chat.script = make_script(
        ("[[ ## iteration ## ]]\n2/20", "SUBMIT(answer=str(said))"),
        ("[[ ## iteration ## ]]\n1/20", """
            said = [llm_query("one"), llm_query_batched(["two"], concurrency=1)]
            try:
                llm_query("three")
            except BudgetExceeded:
                said.append("budget")
            try:
                import dspy
            except ImportError:
                said.append("no dspy")
            for name in ("__dspy_construct__", "__dspy_call__"):
                said.append(name in globals())
            print(said)
            """),
        is_dspy=True,
    )  # fmt: skip
    model = LanguageModel(model="openai/gpt-4o", api_key=SecretStr("sk-ours"), api_base=chat.url)
    rlm = dspy.RLM("query -> answer", interpreter_factory=factory(language_model=model, max_llm_calls=2))
    answer = rlm(query="what?")
    assert answer.answer == str(["answer to: one", ["answer to: two"], "budget", "no dspy", False, False])
    ours = [request for request in chat.requests if request.model == "gpt-4o"]
    assert [request.messages for request in ours] == [["one"], ["two"]]
    assert {request.headers["authorization"] for request in ours} == {"Bearer sk-ours"}


def test_the_budget_covers_the_whole_session_and_code_runs_at_depth_one(chat, protocol):
    chat.script = make_script(("", "SUBMIT(answer=rlm_query('deeper'))"))
    model = LanguageModel(model=NAME, api_key=SecretStr("sk-x"), api_base=chat.url)
    interpreter = factory(language_model=model, max_llm_calls=3, max_depth=1)()
    try:
        assert interpreter.execute("print(llm_query('a'), llm_query('b'))") == "answer to: a answer to: b\n"
        with pytest.raises(protocol.CodeExecutionError, match="DepthExceeded"):
            interpreter.execute("rlm_query('x')")
        interpreter.execute("llm_query('c')")
        with pytest.raises(protocol.CodeExecutionError, match="all 3 calls"):
            interpreter.execute("llm_query('d')")
    finally:
        interpreter.shutdown()
    assert chat.stats.requests == 3
