"""The UI of the shared server in a real browser: it opens with the password only."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from rlm_batch.cli.server import stop_servers
from rlm_batch.flows.server.shared import SharedServer, start_shared_server

from ..infra.prefect_database import make_prefect_home
from .chromium import FILL, Chromium

pytestmark = [pytest.mark.full, pytest.mark.timeout(600), pytest.mark.requires("chromium")]


@pytest.fixture
def shared(tmp_path: Path, no_process_left: None) -> Iterator[SharedServer]:
    with temporary_settings({PREFECT_HOME: make_prefect_home(tmp_path / "home"), PREFECT_API_URL: None}):
        server = start_shared_server()
        yield server
        server.close()
        stop_servers(force=True)


def test_the_ui_asks_for_the_password_and_then_opens(shared: SharedServer) -> None:
    with Chromium() as page:
        page.goto(f"{shared.ui_url}/login")
        for password, shown in (("a guess", "Authentication failed"), (shared.auth, "Deployments")):
            page.until(
                lambda password=password: page.js(
                    "(() => { const e = document.querySelector('input[type=password]'); if (!e) return false;"
                    f"{FILL}(e, {json.dumps(password)}); return true; }})()"
                ),
                "the field of the password",
            )
            page.click("Login")
            page.see(shown)
