"""Proxy settings of the environment: local servers are reached directly, remote ones through the proxy."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ..infra.prefect_database import make_prefect_home
from ..infra.programs import COMMAND, run_program

CODE = "import os\nSUBMIT(proxies=sorted(name for name in os.environ if name.lower().endswith('_proxy')))"


class Proxy(ThreadingHTTPServer):
    """A proxy that refuses every request and records it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.connections = 0
        self.requests: list[str] = []

    def process_request(self, request: object, client_address: object) -> None:
        self.connections += 1
        super().process_request(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Proxy)
        self.server.requests.append(self.path)
        self.send_error(502)

    do_POST = do_CONNECT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def run_command(tmp_path: Path, settings: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these proxy settings and no others."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PREFECT_API_URL" and not name.lower().endswith("_proxy")
    }
    environment |= {"PREFECT_HOME": str(tmp_path / "home"), "RLM_BATCH_RESULTS": str(tmp_path / "results"), **settings}
    return run_program([COMMAND, *words], env=environment, cwd=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"http_proxy": "http://PROXY", "HTTPS_PROXY": "PROXY", "ALL_PROXY": "http://user:password@PROXY"},
            id="http",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"ALL_PROXY": "socks5://PROXY", "HTTP_PROXY": "socks5h://PROXY", "NO_PROXY": "example.org [::1], fd00::/8"},
            id="socks5",
            marks=pytest.mark.full,
        ),
        pytest.param({"all_proxy": "socks://PROXY/", "no_proxy": "", "NO_PROXY": "*.example.org"}, id="socks"),
    ],
)
def test_local_servers_bypass_the_proxy_and_code_sees_no_proxy(
    tmp_path: Path, proxy: Proxy, settings: dict[str, str]
) -> None:
    make_prefect_home(tmp_path / "home")
    (tmp_path / "one.py").write_text(CODE)
    variables = {name: value.replace("PROXY", proxy.address) for name, value in settings.items()}
    done = run_command(tmp_path, variables, "batch", "one.py", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"] == {"proxies": []}
    assert proxy.connections == 0, proxy.requests


def test_a_remote_server_is_reached_through_the_proxy(tmp_path: Path, proxy: Proxy) -> None:
    settings = {"http_proxy": f"http://{proxy.address}", "PREFECT_API_URL": "http://prefect.invalid:4200/api"}
    settings["PREFECT_CLIENT_MAX_RETRIES"] = "0"
    done = run_command(tmp_path, settings, "deploy")
    assert "does not answer" in done.stderr
    assert proxy.requests[0] == "http://prefect.invalid:4200/api/admin/version"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "foo://user:password@h:1"),
        pytest.param("HTTP_PROXY", "user:password@h:port", marks=pytest.mark.full),
    ],
)
def test_an_invalid_proxy_is_a_one_sentence_error(tmp_path: Path, server: str, name: str, value: str) -> None:
    refused = run_command(tmp_path, {name: value, "PREFECT_API_URL": server}, "deploy")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a proxy variable of the environment is wrong" in refused.stderr
    assert "password" not in refused.stderr
