"""Queries with options: models, messages, images, formats of answers and sampling, from the code to the server."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pydantic
import pytest

from rlm_batch import ConfigurationError, LanguageModel, LocalInterpreter
from rlm_batch.blocks.language_model.litellm_client import IMAGE_TOKENS, LiteLLMModel
from rlm_batch.blocks.language_model.model_access import open_model_access
from rlm_batch.sandbox.queries.budget import Budget
from rlm_batch.sandbox.queries.recursion import Queries
from rlm_batch.sandbox.queries.session import QuerySession, RequestOptions

from ...standins.openai_chat import ChatServer

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
JPEG = b"\xff\xd8\xff\xe0" + bytes(20)


def model(chat: ChatServer, **settings: Any) -> LanguageModel:
    defaults: dict[str, Any] = {"model": NAME, "api_key": "sk-x", "api_base": chat.url}
    return LanguageModel(**{**defaults, **settings})


@pytest.fixture
def interpreter(chat: ChatServer) -> Iterator[LocalInterpreter]:
    models = {"small": model(chat, model="openai/gpt-4.1-nano"), "large": model(chat, model="openai/gpt-5")}
    with LocalInterpreter(
        language_model=model(chat, max_tokens=50, sub_options={"temperature": 0.5, "max_tokens": 40}),
        models=models,
        max_llm_calls=None,
        isolation="none",
    ) as opened:
        yield opened


def url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def fail(interpreter: LocalInterpreter, call: str) -> str:
    """Return the type and the text of the error of a call."""
    code = f"try:\n    {call}\nexcept Exception as error:\n    SUBMIT(said=f'{{type(error).__name__}}: {{error}}')"
    return interpreter.execute(code).said


def test_the_options_reach_the_server_in_one_query_and_in_a_batch(interpreter, chat):
    interpreter.execute("llm_query('a', model='small', system='Be brief.', temperature=0, max_tokens=7)")
    interpreter.execute("llm_query_batched(['a', 'b'], 1, model='small', system='s', temperature=1.5, max_tokens=9)")
    interpreter.execute("llm_query('a', max_tokens=1000)")  # The code cannot raise the block's limit.
    one, first, second, plain = [request.body for request in chat.requests]
    assert one["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert (one["model"], one["temperature"], one["max_tokens"]) == ("gpt-4.1-nano", 0, 7)
    for body, prompt in ((first, "a"), (second, "b")):
        assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-4.1-nano", 1.5, 9)
    assert plain["messages"] == [{"role": "user", "content": "a"}]
    assert (plain["model"], plain["temperature"], plain["max_tokens"]) == ("gpt-4o-mini", 0.5, 40)


def test_only_the_models_that_the_host_allows_can_be_chosen(interpreter, chat):
    said = fail(interpreter, "llm_query('a', model='openai/gpt-4-32k')")
    assert said == "QueryError: no model 'openai/gpt-4-32k' is allowed here: the names are 'small', 'large'"
    result = interpreter.execute("llm_query_batched(['a'], on_error='return', model='none')")
    assert (result.meta.queries.asked, result.meta.queries.failed) == (1, 1)
    assert not chat.requests
    with LocalInterpreter(language_model=model(chat), isolation="none") as plain:
        assert "none, because models is not set" in fail(plain, "llm_query('a', model='small')")


def test_each_model_has_its_own_price_and_name_in_the_record(interpreter, chat):
    result = interpreter.execute("llm_query('a', model='small'), llm_query('a', model='large'), llm_query('a')")
    records = result.meta.queries.tree
    assert [record["model"] for record in records] == ["openai/gpt-4.1-nano", "openai/gpt-5", NAME]
    assert len({record["cost"] for record in records}) == 3
    assert result.meta.queries.cost == pytest.approx(sum(record["cost"] for record in records))


async def test_models_can_be_a_list_of_names_and_a_wrong_name_fails_early(chat):
    access = await open_model_access(model(chat), models=["openai/gpt-4.1", "openai/gpt-4.1-nano"])
    assert list(access.models) == ["openai/gpt-4.1", "openai/gpt-4.1-nano"]
    with pytest.raises(ConfigurationError, match="'no-such-provider/x' is no known model"):
        await (await open_model_access(model(chat), models=["no-such-provider/x"])).check_models()
    with pytest.raises(ConfigurationError, match="the price of the model openai/unlisted is unknown"):
        await open_model_access(model(chat), models={"a": "openai/unlisted"}, max_cost=1.0)


def test_a_conversation_takes_the_place_of_the_prompt(interpreter, chat):
    code = """
talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "?"}]
SUBMIT(one=llm_query(messages=talk), many=llm_query_batched(messages=[talk, talk[:1]]))
"""
    result = interpreter.execute(code)
    assert (result.one, result.many) == ("answer to: ?", ["answer to: ?", "answer to: hi"])
    assert [message["role"] for message in chat.requests[0].body["messages"]] == ["user", "assistant", "user"]
    assert result.meta.queries.tree[0]["prompt"] == "?"
    assert "both prompt and messages are given" in fail(interpreter, "llm_query('a', messages=[])")
    assert "messages[0] is no message" in fail(interpreter, "llm_query(messages=[{'text': 'a'}])")
    assert "messages[0] is a dict" in fail(interpreter, "llm_query_batched(messages=[{'role': 'user'}])")


class ImageServer(BaseHTTPRequestHandler):
    """A web server with one image."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_images_are_files_bytes_and_urls_and_reach_the_server_as_data_urls(interpreter, chat):
    server = ThreadingHTTPServer(("127.0.0.1", 0), ImageServer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/a.png"
        code = f"""
import pathlib
pathlib.Path("photo").write_bytes({JPEG!r})
llm_query("What is it?", images=["photo", {PNG!r}, {address!r}, pathlib.Path("photo"), {url(PNG, "png")!r}])
llm_query(messages=[{{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": "photo"}}}}]}}])
llm_query_batched(["a", "b"], 1, images=[{PNG!r}])
llm_query_batched(["a", "b"], 1, images=[["photo"], []])
"""
        interpreter.execute(code)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
    jpeg, png = url(JPEG, "jpeg"), url(PNG, "png")
    contents = [request.body["messages"][0]["content"] for request in chat.requests]
    assert contents[0][0] == {"type": "text", "text": "What is it?"}
    images = [[part["image_url"]["url"] for part in content if part["type"] == "image_url"] for content in contents]
    assert images == [[jpeg, png, png, jpeg, png], [jpeg], [png], [png], [jpeg], []]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("['missing.png']", "FileNotFoundError"),
        ("[b'no image']", "is not PNG, JPEG, GIF or WebP"),
        ("[bytes([137]) + b'PNG' + bytes(1_500_000)] * 2", "the images of a prompt have more than 2,359,296 bytes"),
        ("['data:text/html,x']", "is no image"),
    ],
)
def test_a_wrong_image_is_refused_in_the_sandbox(interpreter, chat, images, message):
    assert message in fail(interpreter, f"llm_query('a', images={images})")
    assert not chat.requests


TYPES = """
import enum, typing
from dataclasses import dataclass, field

class Colour(enum.Enum):
    RED = "red"

@dataclass
class Point:
    x: int
    tags: list[str] = field(default_factory=list)
    inner: "Point | None" = None
"""
HIT = f"""
import sys
sys.path.append({str(Path(pydantic.__file__).parents[1])!r})
from pydantic import BaseModel

class Hit(BaseModel):
    title: str
    score: float = 1.0
"""


def get_types(kind: str) -> str:
    """Return the code that defines the classes of a format. Pydantic's import takes a while."""
    return TYPES + HIT if "Hit" in kind else TYPES


@pytest.mark.parametrize(
    ("kind", "answer", "value"),
    [
        ("int", '{"value": 42}', "42"),
        ("list[str]", '```json\n{"value": ["a", "b"]}\n```', "['a', 'b']"),
        ("dict[str, typing.Optional[bool]]", '{"a": null}', "{'a': None}"),
        ("set[int]", '{"value": [1, 1, 2]}', "{1, 2}"),
        ("Colour", '{"value": "red"}', "<Colour.RED: 'red'>"),
        ("list[typing.Union[int, Point]]", '{"value": [1, {"x": 2}]}', "[1, Point(x=2, tags=[], inner=None)]"),
        (
            "Point",
            '{"x": 1, "tags": ["t"], "inner": {"x": 2, "tags": [], "inner": null}}',
            "Point(x=1, tags=['t'], inner=Point(x=2, tags=[], inner=None))",
        ),
        ("list[Hit]", '{"value": [{"title": "a"}]}', "[Hit(title='a', score=1.0)]"),
        ("{'type': 'array', 'items': {'type': 'integer'}, 'maxItems': 2}", '{"value": [1, 2]}', "[1, 2]"),
    ],
)
def test_a_format_gives_a_value(interpreter, chat, kind, answer, value):
    chat.rule("q", answer)
    assert (
        interpreter.execute(f"{get_types(kind)}\nSUBMIT(found=repr(llm_query('q', response_format={kind})))").found
        == value
    )
    sent = chat.requests[0].body["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["schema"]["type"] == "object"


@pytest.mark.parametrize(
    ("kind", "answer", "problem"),
    [
        ("int", "forty two", "it is not JSON. The answer: forty two"),
        ("int", '{"value": "42"}', "it['value'] is '42' and must be of the type integer"),
        ("Point", '{"tags": []}', "it has no 'x'"),
        ("Hit", '{"title": 5}', "Input should be a valid string"),
        ("{'type': 'object', 'properties': {'a': {'minimum': 3}}}", '{"a": 2}', "it['a'] is 2 and its minimum is 3"),
        ("{'$ref': '#/$defs/a', '$defs': {'a': {'type': 'array', 'maxItems': 1}}}", '{"value": [1, 2]}', "length 2"),
        ("{'type': 'object', 'additionalProperties': False}", '{"a": 2}', "a field 'a' that the schema does not have"),
        ("{'type': 'object', 'allOf': [{'$ref': '#'}]}", "{}", "recursion"),
    ],
)
def test_an_answer_that_does_not_fit_raises_a_query_error(interpreter, chat, kind, answer, problem):
    chat.rule("q", answer)
    said = interpreter.execute(f"""{get_types(kind)}
try:
    llm_query('q', response_format={kind})
except QueryError as error:
    SUBMIT(said=str(error))
""").said
    assert said.startswith("llm_query: the model's answer does not fit response_format: ")
    assert problem in said


def test_in_a_batch_only_the_answers_that_do_not_fit_are_errors(interpreter, chat):
    chat.rule("good", '{"value": 7}')
    code = "SUBMIT(x=[str(r) for r in llm_query_batched(['good', 'bad'], on_error='return', response_format=int)])"
    good, bad = interpreter.execute(code).x
    assert good == "7"
    assert "does not fit response_format" in bad


def test_the_server_is_told_to_be_strict_if_the_schema_allows_it(interpreter, chat):
    answers = {"int": '{"value": 1}', "Hit": '{"title": ""}', "{'type': 'object', 'properties': {'a': {}}}": "{}"}
    chat.rule("q", *answers.values())
    for kind in answers:
        interpreter.execute(f"{get_types(kind)}\nllm_query('q', response_format={kind})")
    formats = [request.body["response_format"]["json_schema"] for request in chat.requests]
    assert [found.get("strict") for found in formats] == [True, True, None]


async def test_a_listed_model_without_schemas_gets_the_schema_as_an_instruction(chat):
    block = model(chat, model="openai/gpt-4", max_tokens=9)
    schema = {"type": "object", "properties": {}}
    await block.make_flat_model().ask([{"role": "user", "content": "q"}], RequestOptions(response_format=schema))
    body = chat.requests[0].body
    assert "response_format" not in body
    assert json.dumps(schema) in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'a', temperature=-1", "ValueError: temperature: Input should be greater than or equal to 0"),
        ("'a', max_tokens=0", "ValueError: max_tokens: Input should be greater than or equal to 1"),
        ("'a', model=3", "ValueError: model: Input should be a valid string"),
        ("'a', response_format=open", "response_format cannot be"),
        ("", "prompt is a NoneType: pass a text or a list of messages"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_asked(interpreter, chat, arguments, message):
    assert message in fail(interpreter, f"llm_query({arguments})")
    assert not chat.requests


def nest(levels: int) -> dict[str, Any]:
    """Return a schema that doubles at each level once its references are followed."""
    definitions = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} if level < levels else {"type": "null"}
        for level in range(levels + 1)
    }
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


FORGED: list[dict[str, Any]] = [
    {"prompts": [{"role": "user"}]},
    {"prompts": [[]]},
    {"prompts": [[{"role": "tool", "content": "x"}]]},
    {"prompts": [[{"role": "user", "content": "x", "name": "n"}]]},
    {"prompts": [[{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]]},
    {"prompts": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1"}}]}]]},
    {"prompts": [[{"role": ["user"], "content": "x"}]]},
    {"images": ["http://169.254.169.254/latest"]},
    {"images": ["file:///etc/passwd"]},
    {"images": "data:image/png;base64,AA"},
    {"temperature": True},
    {"temperature": 3},
    {"max_tokens": 2.5},
    {"max_tokens": 0},
    {"model": ["small"]},
    {"system": 5},
    {"response_format": {"type": "array"}},
    {"response_format": {"type": "object", "description": "x" * 70_000}},
    {"response_format": nest(30)},
    {"response_format": {"type": "object", "$defs": 3}},
    {"logprobs": True},
    {"api_base": "http://10.0.0.1"},
]


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
async def test_the_host_refuses_a_forged_call(chat, forged):
    served = model(chat).make_flat_model()
    session = QuerySession(
        root_model=served, flat_model=served, budget=Budget(), concurrency=2, models={"small": served}
    )

    async def recurse(*_: object) -> str:
        return ""

    ask = Queries(session, recurse, max_depth=2).tools["llm_query"]
    with pytest.raises((TypeError, ValueError)):
        await ask(**{"prompts": ["a"], "concurrency": None, **forged})
    assert not chat.requests


async def test_an_estimate_counts_images_by_number_and_the_schema_by_its_bytes(chat):
    served: LiteLLMModel = model(chat, model="openai/gpt-4o", max_tokens=10).make_flat_model()
    large = url(PNG + bytes(500_000), "png")
    parts = [{"type": "text", "text": "what"}, *[{"type": "image_url", "image_url": {"url": large}}] * 2]
    plain = await served.estimate_max_usage([{"role": "user", "content": "what"}])
    seen = await served.estimate_max_usage([{"role": "user", "content": parts}])
    assert 2 * IMAGE_TOKENS < seen.prompt_tokens - plain.prompt_tokens < 2 * IMAGE_TOKENS + 100
    schema = {"type": "object", "description": "x" * 1000}
    options = RequestOptions(response_format=schema, max_tokens=4)
    formed = await served.estimate_max_usage([{"role": "user", "content": "what"}], options)
    assert 1000 < formed.prompt_tokens - plain.prompt_tokens < 1200
    assert (plain.answer_tokens, formed.answer_tokens) == (10, 4)


def test_the_cache_tells_options_apart(chat, tmp_path: Path):
    with LocalInterpreter(language_model=model(chat), cache_queries=True, isolation="none") as opened:
        for _ in range(2):
            opened.execute("llm_query('a'), llm_query('a', temperature=1), llm_query('a', system='s')")
    assert chat.stats.requests == 3


async def test_only_options_that_are_used_change_the_fingerprint(chat):
    plain = (await open_model_access(model(chat, temperature=0, retries=7))).fingerprint()
    assert plain == model(chat, temperature=0).fingerprint() == {"model": NAME, "api_base": chat.url, "temperature": 0}
    more = (
        await open_model_access(model(chat, sub_options={"top_p": 0.5}), models={"x": "openai/gpt-5"})
    ).fingerprint()
    assert more["sub_options"] == {"top_p": 0.5}
    assert more["models"] == {"x": {"model": "openai/gpt-5"}}
