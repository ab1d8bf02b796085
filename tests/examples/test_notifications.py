"""Notifications: a message when a sweep fails, and one when the best trial beats the previous best."""

import asyncio
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.events.worker import EventsWorker

from rlm_batch import ExecutionsFailed, sweep

from ..infra.programs import run_program
from ..infra.waiting import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ["a sweep failed", "a sweep found a better trial"]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """Start a server on loopback; yield its address and the list of posted messages."""
    posted: list[Any] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Takes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", posted
        server.shutdown()


def wait_for_message(posted: list[Any], word: str) -> Any:
    """Return the first message that contains the word, once it is there."""
    (message, *_) = wait_until(lambda: [message for message in posted if word in json.dumps(message)], word)
    return message


def test_prefect_accepts_the_automations_of_the_example() -> None:
    text = (EXAMPLES / "automations.yaml").read_text().replace("WEBHOOK_BLOCK_ID", str(uuid.uuid4()))
    made = [AutomationCore.model_validate(automation) for automation in yaml.safe_load(text)["automations"]]
    assert [automation.name for automation in made] == NAMES


def notify(address: str) -> list[str]:
    """Run the example, and return the names of its automations on the server."""
    made = run_program([sys.executable, str(EXAMPLES / "notify.py"), address], env=os.environ)
    assert made.returncode == 0, made.stdout + made.stderr
    with get_client(sync_client=True) as client:
        return sorted(automation.name for automation in client.read_automations() if automation.name in NAMES)


@pytest.mark.usefixtures("server")
def test_the_example_run_twice_makes_each_automation_once() -> None:
    assert [notify(f"http://127.0.0.1:9/{number}") for number in range(2)] == [NAMES, NAMES]


@pytest.mark.full
def test_the_messages_of_the_example_arrive(
    server: str, webhook: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    address, posted = webhook
    assert notify(address) == NAMES

    with pytest.raises(ExecutionsFailed):
        asyncio.run(sweep("raise ValueError('what is \"this\"')", {"x": [1]}))
    assert "1 of 1 trials failed" in wait_for_message(posted, "failed")["text"]

    from nightly import nightly  # type: ignore[import-not-found]

    first = asyncio.run(nightly([32]))
    second = asyncio.run(nightly([32, 64]))
    assert second < first
    EventsWorker.drain_all()
    message = wait_for_message(posted, "the best loss is")
    assert message["best"] == {"loss": second, "lr": 0.01, "batch_size": 64}
    assert f"and was {first:.6g}" in message["text"]
