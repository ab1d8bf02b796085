"""Validation of a call's parameters, before the flow contacts or starts a server."""

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, batch, chunks, sequence, sweep
from rlm_batch.flows.inputs.spilling import read_text_reference
from rlm_batch.flows.server.process import ServerProcess

from ...infra.planning import plan_batch, plan_steps
from ...infra.postgres import Postgres
from ..conftest import find_run_id


@pytest.fixture(autouse=True)
def no_server(closed_address: str) -> Iterator[None]:
    """Make every call fail that contacts a server."""
    with temporary_settings({PREFECT_API_URL: f"http://{closed_address}/api"}):
        yield


@pytest.mark.parametrize(
    ("flow", "parameters"),
    [
        (batch, {"code": "hello.py"}),
        (batch, {"code": (text for text in ["SUBMIT()", "hello.py"])}),
        (batch, {"code": "SUBMIT()", "prepare": "hello.py"}),
        (sweep, {"code": "hello.py", "grid": {"x": [1]}, "objective": "loss"}),
        (chunks, {"code": "SUBMIT()", "data": [1], "chunk_size": 1, "reduce": "hello.py"}),
        (sequence, {"steps": ["hello.py"]}),
    ],
    ids=["batch", "one of several", "prepare", "sweep", "reduce", "sequence"],
)
def test_a_file_name_instead_of_code_is_refused_without_a_server(flow: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        flow.sync(**parameters)
    assert str(caught.value) == (
        "the code is 'hello.py', the name of a file: pass the text of a program, as in Path('hello.py').read_text()"
    )


@pytest.mark.parametrize(
    ("flow", "parameters", "words"),
    [
        (batch, {"code": "SUBMIT()", "max_workers": "many"}, r"`max_workers` is 'many': it should be a valid integer"),
        (batch, {"code": "SUBMIT()", "timeout": -1}, r"`timeout` is -1: it should be greater than 0"),
        (
            batch,
            {"code": 7, "on_failure": "ignore"},
            r"code.*; `on_failure` is 'ignore': it should be 'raise' or 'return'",
        ),
        (sequence, {"steps": 3, "python_path": 3}, r"steps.*; `python_path` is 3: it should be a valid list"),
        (
            sweep,
            {"code": "", "grid": {}, "mounts": ["/data"]},
            r"`mounts` is \['/data'\]: it should be a valid dictionary",
        ),
        (batch, {"code": "", "inputs": 5}, r"^`inputs` is 5: it should be a valid list"),
        (batch, {"code": "", "inputs": [{"x": 1}, 2]}, r"^`inputs`\[1\] is 2: it should be a valid dictionary$"),
        (sweep, {"code": "", "grid": {"x": "adam"}}, r"^`grid`\['x'\] is 'adam': it should be a valid list$"),
        (chunks, {"code": "", "data": [1], "mounts": {"/usr": "."}}, r"/usr is used by the sandbox itself"),
        (batch, {"code": "SUBMIT('\ud800')"}, r"code has text with a lone surrogate"),
        (
            batch,
            {"code": "SUBMIT()", "inputs": [{"x": 2**64, "y": ["\ud800"]}]},
            r"inputs has text with a lone surrogate",
        ),
        (sweep, {"code": "", "points": "a\0.csv"}, r"points has a NUL character"),
        (batch, {"code": "", "results_path": "a\0"}, r"results_path has a NUL character"),
        (
            batch,
            {"code": "", "provider_options": {"environment": {"A": "\0"}}},
            r"provider_options has a NUL character",
        ),
        (batch, {"code": "", "provider_options": {"volume_root": Path("/")}}, r"`volume_root` is PosixPath"),
    ],
)
def test_a_wrong_type_or_value_is_refused_without_a_server(
    flow: Any, parameters: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        flow.sync(**parameters)
    assert "\n" not in str(caught.value)
    assert not caplog.messages  # the log does not repeat the error


NOT_JSON: list[tuple[Any, str, str, str]] = [
    (batch, "inputs", "pandas.DataFrame([[1, 2]])", "inputs[0] has the key 0, which is not a string"),
    (batch, "inputs", "pandas.Series([1, 2])", "`inputs`[0] is 1: it should be a valid dictionary"),
    (
        batch,
        "inputs",
        "numpy.array([(1, 2.0)], [('a', 'i4'), ('b', 'f8')])",
        "`inputs`[0] is (1, 2.0): it should be a valid dictionary",
    ),
    (batch, "inputs", "[{'x': decimal.Decimal('1.10')}]", "inputs[0]['x'] is a Decimal, which is not JSON: use"),
    (batch, "inputs", "[{1: 2}]", "inputs[0] has the key 1, which is not a string: use strings as keys"),
    (sweep, "grid", "pandas.DataFrame({'x': [1]})", "use grid.to_dict('list')"),
    (sweep, "grid", "{'x': {1, 2}}", "grid['x'] is a set"),
    (sweep, "grid", "{'x': pandas.Series([1, 2], index=['a', 'b'])}", "tolist() without the index"),
    (sweep, "grid", "{'x': numpy.array(['2026-01-02'], 'M8[D]')}", "use astype(str)"),
    (sweep, "space", "{'x': {'low': 0, 'high': decimal.Decimal(1)}}", "space['x']['high'] is a Decimal"),
    (chunks, "data", "pandas.Series([1, 2], index=['a', 'b'])", "tolist() without the index"),
    (chunks, "chunks", "{'a': pandas.Series([1, 2], index=['a', 'b'])}", "tolist() without the index"),
]


@pytest.mark.parametrize(("flow", "name", "text", "words"), NOT_JSON)
def test_a_value_that_json_cannot_hold_is_refused(flow: Any, name: str, text: str, words: str) -> None:
    options: dict[str, Any] = {"code": "SUBMIT()", **({"chunk_size": 1} if name == "data" else {})}
    options |= {"trials": 1, "objective": "loss"} if name == "space" else {}
    names: dict[str, Any] = {}
    exec("import decimal\nimport numpy, pandas", names)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        flow.sync(**options, **{name: eval(text, names)})


@pytest.mark.anyio
@pytest.mark.parametrize("value", [10**30, "a\0b", {"\0": 1}], ids=["integer", "NUL", "name"])
async def test_values_that_the_server_cannot_store_use_a_file(value: Any, server: str, results: Path) -> None:
    """Prefect's server fails to list runs if one has an integer over 64 bits, and Postgres cannot store NUL."""
    with temporary_settings({PREFECT_API_URL: server}):
        outcomes = await batch("SUBMIT(x=x)", [{"x": value}, {"x": [value]}])
        assert [result.x for result in outcomes] == [value, [value]]
        async with get_client() as client:
            assert (await client.read_flow_run(find_run_id(results))).parameters["inputs"].startswith("@/")
            assert await client.read_flow_runs(limit=1)


def test_a_deployments_run_reads_code_from_allowed_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))  # a worker sets this variable
    file, numbers = tmp_path / "slow.py", tmp_path / "numbers.jsonl"
    unknown, wide = tmp_path / "unknown.py", tmp_path / "wide.py"
    unknown.write_text("# coding: nonsense\n")
    wide.write_text("SUBMIT()", encoding="utf-16")
    numbers.write_text("1\n")
    file.write_text("SUBMIT(y=x)\n")
    decorated = "@staticmethod\ndef f(): pass\n"
    for read in (lambda text: plan_batch([decorated, text]), lambda text: plan_steps(["a = 1", text])):
        with pytest.raises(ConfigurationError, match="allowed_paths"):
            read(f"@{file}")
    allow(allowed_paths=[str(tmp_path)])
    assert plan_batch([decorated, f"@{file}"]) == [(decorated, {}), ("SUBMIT(y=x)\n", {})]
    assert plan_steps(["a = 1", f"@{file}\n"]) == ["a = 1", "SUBMIT(y=x)\n"]
    file.write_bytes(b"# coding: latin-1\nSUBMIT(y='\xe9')\n")
    assert read_text_reference(f"@{file}") == "# coding: utf-8\nSUBMIT(y='é')\n"
    file.write_bytes(b"\xef\xbb\xbfSUBMIT(y=x)\r\n")
    assert read_text_reference(f"@{file}") == "SUBMIT(y=x)\n"
    for place, reason in (
        ("slow.py", r"'slow\.py' is not an absolute path.* @/DIRECTORY/slow\.py"),
        ("./code/slow.txt", "not an absolute path"),
        (f"{file}.old", r"the code in /.*slow\.py\.old cannot be read: No such file"),
        (str(tmp_path), "cannot be read: "),
        (str(numbers), "each line must be a text in JSON"),
        (str(unknown), r"unknown\.py is not UTF-8 text .*unknown encoding"),
        (str(wide), r"wide\.py is not UTF-8 text"),
    ):
        for read in (plan_batch, read_text_reference, lambda text: plan_steps([text])):
            with pytest.raises(ConfigurationError, match=reason) as refused:
                read(f"@{place}")
            assert "\n" not in str(refused.value)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.requires("postgres")
def test_values_names_code_and_output_may_contain_nul(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect may use Postgres, which cannot store a NUL character."""
    with Postgres() as postgres:
        monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", postgres.url)
        with ServerProcess.start(tmp_path / "server") as server, temporary_settings({PREFECT_API_URL: server.url}):
            check_values()


def check_values() -> None:
    inputs = [{"x": "a\0b"}, {"x": {"\0": "\ud7ff"}}]
    results = batch.sync("print(x)\nSUBMIT(y=x, **{'a\\0': 1})", inputs, provider="local:none")
    assert [result.outputs for result in results] == [{"y": item["x"], "a\0": 1} for item in inputs]
    trials = sweep.sync(
        "SUBMIT(loss=len(x))", points=[{"x": "\0"}, {"x": "a"}], objective="loss", provider="local:none"
    )
    assert [trial.meta.variables["x"] for trial in trials.trials] == ["\0", "a"]
    parts = chunks.sync("SUBMIT(n=len(data))", chunks={"a\0": ["\0"]}, provider="local:none")
    assert parts["a\0"].n == 1
