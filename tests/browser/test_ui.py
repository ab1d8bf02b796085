"""Prefect's UI in a real browser, as a user sees it."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlm_batch import LanguageModel, LocalSandbox, sweep

from ..infra.waiting import wait_until
from .chromium import Chromium
from .conftest import sandboxes

FULL = [pytest.mark.full, pytest.mark.timeout(600)]


def ask(ui: str, path: str, **body: Any) -> Any:
    """Return the server's answer; retry while it says 503, as a busy server on SQLite does."""

    def send() -> httpx.Response | None:
        if body:
            answer = httpx.post(f"{ui}/api/{path}", json=body, timeout=60)
        else:
            answer = httpx.get(f"{ui}/api/{path}", timeout=60)
        return None if answer.status_code == 503 else answer.raise_for_status()

    answer = wait_until(send, f"an answer from {path}")
    assert answer is not None
    return answer.json()


def deployment(ui: str) -> str:
    """Return the id of rlm-sweep/local."""
    return ask(ui, "deployments/name/rlm-sweep/local")["id"]


def runs(ui: str) -> list[dict[str, Any]]:
    """Return the deployment's flow runs, the latest first."""
    wanted = {"deployment_id": {"any_": [deployment(ui)]}}
    return ask(ui, "flow_runs/filter", flow_runs=wanted, sort="START_TIME_DESC")


def submit(page: Chromium, form: str, fields: dict[str, str], button: str, has_come: Callable[[], Any]) -> Any:
    """Submit a form and return the value of `has_come`.

    A busy server on SQLite answers 503, and the form then shows an error. This function fills in the form again, as a
    user does.
    """
    while True:
        page.goto(form)
        page.see(*fields)
        for label, value in fields.items():
            page.fill(label, value)
        seen = len(page.refused)
        page.click(button, "button")

        def look(seen: int = seen) -> Any:
            page.text()  # this call also reads the browser's reports on answers
            return has_come() or is_busy(page.refused[seen:])

        page.until(look, f"what {button} makes")
        if outcome := has_come():
            return outcome


def is_busy(refused: list[str]) -> bool:
    """Return True if the server answered that it could not save the form."""
    saving = ("/block_documents", "/create_flow_run")
    return any(answer.startswith("503 ") and any(path in answer for path in saving) for answer in refused)


@pytest.mark.full
def test_the_ui_shows_a_runs_report_and_chart_without_running_scripts(
    ui: str, page: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    code = "if x == 2: raise ValueError('<img src=http://127.0.0.1:9/x onerror=\"document.title=1\"> | **b**')\n"
    code += "SUBMIT(loss=(x - 1) ** 2 + y, **{'![](http://127.0.0.1:9/name)': '![](http://127.0.0.1:9/value)'})"
    grid = {"x": [0, 1, 2], "y": [1, 2], "z": ["![](http://127.0.0.1:9/variable)"]}
    report = asyncio.run(sweep(code, grid, objective="loss", on_failure="return"))
    artifacts = {
        artifact["type"]: f"{ui}/artifacts/artifact/{artifact['id']}"
        for artifact in ask(ui, "artifacts/filter", sort="CREATED_DESC")
        if (artifact["flow_run_id"] or "none") in report.results_path
    }
    page.goto(artifacts["markdown"])
    page.see("Trials, the best first", "4 of 6 trials succeeded, 2 failed; best loss 1 in trial 2 with x=1")
    said = '<img src=http://127.0.0.1:9/x onerror="document.title=1"> | **b**'
    note = f"CodeError: the code raised ValueError (line 1): {said}"
    pictures = "[...document.images].filter(i => i.src.startsWith('data:image/svg') && i.naturalWidth > 300).length"
    page.until(lambda: page.js(pictures) == 2, "the two charts")
    cells = page.js("[...document.querySelectorAll('td')].map(e => e.innerText.trim())")
    assert {"best", note} <= set(cells)
    assert page.js("[...document.images].every(i => !i.src.includes(':9/'))")
    page.goto(artifacts["table"])
    page.see("outcome", "succeeded, 2 failed; best loss 1 in trial 2", "![](http://127.0.0.1:9/value)")
    assert page.js("[...document.images].every(i => !i.src.includes(':9/'))")
    assert not [url for url in page.asked if url.startswith("http") and not url.startswith(ui)]
    assert page.errors == []


class TestAgainstAWorker:
    pytestmark = FULL

    def test_the_ui_shows_deployments_and_block_forms(self, ui: str, served: Path, page: Chromium) -> None:
        page.goto(f"{ui}/deployments")
        page.see("local", "rlm-sweep")
        page.goto(f"{ui}/blocks/catalog/rlm-language-model/create")
        page.see("Sub-model", "US dollars per token of a prompt", "It stays on the host.")
        name = {"Block Name": "from-the-form"}
        fields = {**name, "Model": "openai/gpt-4o-mini", "API key": "sk-that-nobody-sees"}
        form = f"{ui}/blocks/catalog/rlm-language-model/create"
        submit(page, form, fields, "Create", lambda: 'LanguageModel.load("from-the-form")' in page.text())
        assert "sk-that" not in page.text()
        page.goto(f"{ui}/blocks/catalog/rlm-local-sandbox/create")
        page.see("Isolation", "MiB of memory of each process")
        form = f"{ui}/blocks/catalog/rlm-local-sandbox/create"
        submit(page, form, name, "Create", lambda: 'LocalSandbox.load("from-the-form")' in page.text())
        model: Any = LanguageModel.load("from-the-form")
        assert model.api_key.get_secret_value() == "sk-that-nobody-sees"
        saved: Any = LocalSandbox.load("from-the-form")
        assert asyncio.run(saved.fingerprint()) == asyncio.run(LocalSandbox().fingerprint())

    def test_the_form_starts_a_run_and_refuses_a_wrong_value(self, ui: str, served: Path, page: Chromium) -> None:
        page.goto(f"{ui}/deployments/deployment/{deployment(ui)}/run")
        page.see("max_workers", "Executions at the same time. Each is in a separate sandbox.")
        before = len(runs(ui))
        page.fill("max_workers", "0")
        page.click("Submit", "button")
        page.see("0 is less than the minimum of 1")
        assert len(runs(ui)) == before
        form = f"{ui}/deployments/deployment/{deployment(ui)}/run"
        run = submit(page, form, {"max_workers": "2"}, "Submit", lambda: len(runs(ui)) > before and runs(ui))[0]
        assert run["parameters"]["max_workers"] == 2
        page.goto(f"{ui}/runs/flow-run/{run['id']}")
        page.see("Downloading flow code")  # the log loads last and moves the content above it
        page.click("Task Runs", "[role=tab], button, a, li, span")
        page.see("trial 0: lr=0.001, batch_size=32", "trial 3: lr=0.01, batch_size=64")
        assert (served / run["id"]).is_dir()
        wait_until(lambda: runs(ui)[0]["state_type"] == "COMPLETED", "a completed run", timeout=200)

    @pytest.mark.parametrize("prefix", ["", "/v2"], ids=["first UI", "second UI"])
    def test_the_form_edits_the_grid(self, ui: str, served: Path, page: Chromium, prefix: str) -> None:
        form, before = f"{ui}{prefix}/deployments/deployment/{deployment(ui)}/run", len(runs(ui))

        def look() -> Any:
            page.text()
            return len(runs(ui)) > before or is_busy(page.refused)

        while len(runs(ui)) == before:
            page.goto(form)
            page.refused.clear()
            page.see("Values of each variable; every combination is a trial.")
            page.edit("grid", '{"lr": [0.5], "batch_size": [32]}')
            page.click("Submit", "button")
            page.until(look, "a run or a busy server")
        assert runs(ui)[0]["parameters"]["grid"] == {"lr": [0.5], "batch_size": [32]}
        wait_until(lambda: runs(ui)[0]["state_type"] == "COMPLETED", "a completed run", timeout=200)

    def test_cancelling_a_run_in_the_ui_leaves_no_sandbox(self, ui: str, served: Path, page: Chromium) -> None:
        created = ask(
            ui,
            f"deployments/{deployment(ui)}/create_flow_run",
            parameters={"code": "import time\nprint('asleep', flush=True)\ntime.sleep(3600)", "timeout": 3600},
            state={"type": "SCHEDULED"},
        )
        wait_until(sandboxes, "a sandbox", timeout=200)
        page.goto(f"{ui}/runs/flow-run/{created['id']}")
        page.see("asleep")  # the run's log shows the code's output while it runs
        page.click("Cancel", "button")
        page.click("Confirm", ".p-modal__footer button")
        wait_until(lambda: not sandboxes(), "the end of the sandboxes", timeout=200)
        page.see("Cancelled", "interrupted; the results so far are in", "Flow run was cancelled.")
        log = ask(ui, "logs/filter", logs={"flow_run_id": {"any_": [created["id"]]}})
        assert [line["message"] for line in log if re.search("Crash|Finished in state", line["message"])] == []
