"""Environment variables of a run: plain ones among the provider's options, and secrets of this process."""

import asyncio
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    AsyncLocalInterpreter,
    CodeError,
    CodeSyntaxError,
    ConfigurationError,
    ContainerSandbox,
    ExecutionsFailed,
    LocalSandbox,
    PrepareError,
    SubmitError,
    batch,
    sequence,
)

from ..infra.deployed import Deployed
from ..infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PODMAN = [pytest.mark.requires("podman"), pytest.mark.full]
CODE = "import os\nSUBMIT(stage=os.environ.get('STAGE'), size=len(os.environ.get('TOKEN_OF_TEST', '')))"


async def test_a_run_sets_environment_variables_beside_those_of_the_block() -> None:
    name = f"env-{uuid.uuid4().hex[:8]}"
    await LocalSandbox(environment={"STAGE": "saved", "TOKEN_OF_TEST": "abc"}).save(name)  # type: ignore[arg-type]
    for options, expected in (({}, "saved"), ({"environment": {"STAGE": "run"}}, "run")):
        (result,) = await batch([CODE], provider=f"rlm-local-sandbox/{name}", provider_options=options)
        assert (result.stage, result.size) == (expected, 3)


async def test_another_environment_runs_again_and_another_value_of_a_secret_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(stage: str, secret: str) -> tuple[Any, ...]:
        monkeypatch.setenv("TOKEN_OF_TEST", secret)
        options: Any = {"provider_options": {"environment": {"STAGE": stage}}, "secrets": ["TOKEN_OF_TEST"]}
        (result,) = await batch([CODE], results_path=str(tmp_path), **options)
        return result.stage, result.size

    assert await run("a", "one") == ("a", 3)
    assert await run("b", "one") == ("b", 3)
    assert await run("b", "three") == ("b", 3)  # the result of the run before
    assert await run("a", "three") == ("a", 3)
    text = "".join(path.read_text() for path in tmp_path.glob("*.json*"))
    assert text.count('"status":"succeeded"') == 3  # The result of the first run is copied for the last.


async def test_results_of_a_version_that_ignored_the_environment_run_again_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"results_path": str(tmp_path), "provider_options": {"environment": {"STAGE": "a"}}}
    await batch([CODE], **options)
    (record,) = tmp_path.glob("run-*.json")
    record.write_text(re.sub(r'"key_version": \d+, ', "", record.read_text()))
    for expected_count in (1, 1):  # The next run after it has new keys.
        await batch([CODE], **options)
        warnings = [text for text in caplog.messages if "a version that ignored `environment`" in text]
        assert len(warnings) == expected_count


async def test_a_secret_reaches_the_code_and_no_log_ledger_or_server(
    results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value = f"secret-{uuid.uuid4().hex}"
    monkeypatch.setenv("TOKEN_OF_TEST", value)
    (result,) = await batch([CODE], secrets=["TOKEN_OF_TEST"], provider_options={"environment": {"STAGE": "test"}})
    assert (result.stage, result.size) == ("test", len(value))
    (step,) = await sequence([CODE], secrets=["TOKEN_OF_TEST"])
    assert step.size == len(value)
    assert value not in caplog.text
    assert "TOKEN_OF_TEST" not in str(os.environ.get("PREFECT_API_URL"))
    server_home = find_database().parent
    files = [path for root in (results, server_home) for path in root.rglob("*") if path.is_file()]
    assert find_database() in files
    assert [path for path in files if value.encode() in path.read_bytes()] == []
    # The search finds what the server has: the name of the secret is a parameter of the run.
    assert any(b"TOKEN_OF_TEST" in path.read_bytes() for path in files if path.is_relative_to(server_home))


ECHO = """
import json, os, sys, time
secret, pem = os.environ["TOKEN_OF_TEST"], os.environ["PEM_OF_TEST"]
print("plain", secret, repr({"token": secret}), json.dumps([pem]))
sys.stdout.write("split " + secret[:9])
sys.stdout.flush()
time.sleep(0.3)
sys.stdout.write(secret[9:] + " end of the line\\n" + os.environ["STAGE"] + "\\n")
print(pem, end='', file=sys.stderr)
display({"token": secret})
if fails:
    raise ValueError("refused: " + secret)
[secret, pem]
"""


@pytest.mark.parametrize("kind", [LocalSandbox, pytest.param(ContainerSandbox, marks=PODMAN)])
async def test_secrets_that_code_prints_or_raises_are_masked_everywhere(
    kind: Any, results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    value = f"secret+{uuid.uuid4().hex}"
    line = uuid.uuid4().hex
    monkeypatch.setenv("TOKEN_OF_TEST", value)
    name = f"env-{uuid.uuid4().hex[:8]}"
    block = kind(environment={"PEM_OF_TEST": f"-----BEGIN-----\n{line}\n-----END-----\n"})
    await block.save(name)
    options: Any = {
        "provider": f"{block.provider_name}-sandbox/{name}",
        "provider_options": {"environment": {"STAGE": "a value that the run's parameters show"}},
        "secrets": ["TOKEN_OF_TEST"],
    }
    inputs = [{"fails": False}, {"fails": True}]
    outcomes = await batch(ECHO, inputs, on_failure="return", results_path=str(results / "batch"), **options)
    steps = await sequence([ECHO.replace("fails", "True")], on_failure="return", **options)
    for outcome in (*outcomes, *steps):
        assert outcome.meta.stdout == (
            "plain [...] {'token': '[...]'} [\"[...]\"]\nsplit [...] end of the line\n"
            "a value that the run's parameters show\n"
        )
        assert outcome.meta.stderr == "[...]"
        assert outcome.meta.displays == ({"text/plain": "{'token': '[...]'}"},)
    assert outcomes[0].meta.value == ["[...]", "[...]"]
    error: Any = outcomes[1].error
    assert (error.type, error.message) == ("ValueError", "refused: [...]")
    assert "refused: [...]" in error.traceback
    with pytest.raises(PrepareError, match=r"refused: \[\.\.\.\]"):
        await batch(["1"], prepare=ECHO.replace("fails", "True").replace("display(", "print("), **options)
    page = tmp_path / "page.html"
    report = [sys.executable, "-m", "rlm_batch.cli.main", "report", str(results / "batch"), "--html", str(page)]
    await asyncio.to_thread(subprocess.run, report, check=True, timeout=100)
    assert "refused: [...]" in page.read_text()
    await wait_until_async(lambda: any(b"refused: [...]" in path.read_bytes() for path in list_server_files()))
    files = [page, *(path for path in results.rglob("*") if path.is_file()), *list_server_files()]
    for text in (value, value.replace("+", "%2B"), line):
        assert text not in caplog.text
        assert [path for path in files if text.encode() in path.read_bytes()] == []


async def test_live_output_has_whole_lines_without_secrets() -> None:
    secret = uuid.uuid4().hex
    heard: list[str] = []
    code = "import os, time\ns = os.environ['TOKEN']\n"
    code += "for piece in ('10 %\\r20 %', '\\r', s, s[:9], s[9:] + '\\nend', ' of it'):\n"
    code += "    print(piece, end='', flush=True)\n    time.sleep(0.1)"
    async with AsyncLocalInterpreter(environment={"TOKEN": secret}) as interpreter:
        result = await interpreter.execute(code, on_output=lambda _stream, text: heard.append(text))
    assert result.meta.stdout == "10 %\r20 %\r[...][...]\nend of it"
    assert heard == ["10 %\r", "20 %\r", "[...][...]\n", "end of it"]


async def test_a_cut_in_the_output_leaves_no_part_of_a_secret() -> None:
    secret = uuid.uuid4().hex
    async with AsyncLocalInterpreter(environment={"TOKEN": secret}) as interpreter:
        for before in range(49_960, 50_010, 7):
            code = f"import os\nprint('x' * {before} + os.environ['TOKEN'] * 9000 + 'y' * {before - 5_000})"
            text = (await interpreter.execute(code)).meta.stdout
            assert text.startswith("x" * 40_000)
            assert "characters dropped" in text
            assert text.endswith("y" * 40_000 + "\n")
            assert not any(secret[start : start + 5] in text for start in range(len(secret) - 4)), before


async def test_a_cut_in_an_error_or_a_value_leaves_no_part_of_a_secret() -> None:
    secret = uuid.uuid4().hex
    async with AsyncLocalInterpreter(environment={"TOKEN": secret}) as interpreter:
        prefix = "import os\nsecret = os.environ['TOKEN']\nclass Shown:\n    def __repr__(self): return text\n"
        for before in range(19_960, 20_000, 7):
            text = f"text = 'x' * {before} + secret * 9000\n"
            for end in ("raise ValueError(text)", "Shown()", "text.encode()", "display(Shown())"):
                outcome: Any = None
                try:
                    outcome = await interpreter.execute(prefix + text + end)
                except CodeError as error:
                    outcome = error
                shown = str(getattr(outcome, "text", "")) + repr(outcome.meta)
                assert "x" * 9_000 in shown
                assert not any(secret[start : start + 5] in shown for start in range(len(secret) - 4)), (end, before)


async def test_spellings_of_a_secret_in_urls_html_and_bytes_are_masked() -> None:
    code = (
        "import html, os, urllib.parse as u\ns = os.environ['TOKEN']\n"
        "print(u.quote(s), u.quote_plus(s), html.escape(s), ascii(s), s.encode())"
    )
    async with AsyncLocalInterpreter(environment={"TOKEN": "pä ss/wörd+<&>"}) as interpreter:
        assert (await interpreter.execute(code)).meta.stdout == "[...] [...] [...] '[...]' b'[...]'\n"


async def test_a_secret_that_is_a_word_of_the_protocol_changes_no_class_of_errors() -> None:
    async with AsyncLocalInterpreter(environment={"MODE": "submit", "KIND": "syntax"}) as interpreter:
        for code, kind in (("SUBMIT(a=object())", SubmitError), ("x = = 1", CodeSyntaxError)):
            with pytest.raises(kind):
                await interpreter.execute(code)


async def test_a_secret_that_is_not_unicode_is_refused_and_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "abc\udcff\udcfedefghijkl")
    with pytest.raises(ExecutionsFailed, match="environment: 'utf-8' codec can't encode"):
        await batch([CODE], secrets=["TOKEN_OF_TEST"])
    assert await LocalSandbox().list_sandboxes() == []


async def test_variables_without_secrets_build_no_filter() -> None:
    for environment in ({}, {"LEVEL": "3", "MODE": "default", "SHORT": "abcde"}):
        async with AsyncLocalInterpreter(environment=environment) as interpreter:
            assert interpreter._interpreter is not None
            assert interpreter._interpreter.sandbox.hide is None


def list_server_files() -> list[Path]:
    """Return all files of the tests' Prefect server."""
    return [path for path in find_database().parent.rglob("*") if path.is_file()]


def find_database() -> Path:
    """Return the database of the tests' Prefect server."""
    from ..conftest import HOME

    (path,) = (Path(HOME) / "server").rglob("prefect.db")
    return path


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"secrets": ["NO_SUCH_VARIABLE_HERE"]}, "no such environment variable: export it first"),
        ({"secrets": ["PATH"], "shards": 2}, "a job in shards cannot take `secrets`"),
        ({"provider_options": {"environment": {"A=B": "c"}}}, "'A=B' is not the name of an environment variable"),
        ({"provider_options": {"environment": "A=B"}}, "environment"),
        ({"provider_options": {"repo_token": "c"}}, "repo_token"),
    ],
)
async def test_wrong_variables_are_refused_with_one_sentence(parameters: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        await batch(["SUBMIT()"], **parameters)
    assert "\n" not in str(raised.value)


async def test_a_run_of_a_deployment_gets_no_secret_of_its_worker() -> None:
    flow = await Deployed.made(code=[CODE], secrets=["PATH"])
    state = await flow.execute()
    assert state.is_failed()
    assert "a run of a deployment cannot take `secrets`" in str(state.message)
