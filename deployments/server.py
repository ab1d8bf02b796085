"""A Prefect server as a process of ours, on loopback, with the settings that suit us."""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx
from prefect.settings import get_current_settings

from ..flows.child_process import read_failure_reason
from ..flows.proxies import check_proxies
from ..flows.server.launch import create_prefect_home
from ..flows.server.origin_guard import APP_DIR, FACTORY, build_origin_settings
from ..sandbox.errors import ConfigurationError
from .process import PrefectProcess, end_process

WORK_POOL = "rlm-batch"  # the name of the pool whose workers run our deployments
START_TIMEOUT_SECONDS = 120.0  # seconds; a first start migrates a database, which takes up to 28 s on two cores

OWNER_TIMEOUT_SECONDS = 1.0  # seconds for what listens on a taken port to say what it is; a Prefect server needs 0.01


class PrefectServer(PrefectProcess):
    """A context manager: the server runs within it, and `url` is what `PREFECT_API_URL` is set to.

    `home` is where its database lives (PREFECT_HOME), unless `database` is the URL of another one; `port` is a free one
    by default; `auth` is what it asks its clients for, as NAME:PASSWORD. Web pages of other addresses than its own are
    refused. Its log goes to `server.log` in the home. Raises ConfigurationError where the port is taken, or the server
    does not start.
    """

    def __init__(
        self, home: Path, port: int | None = None, database: str | None = None, auth: str | None = None
    ) -> None:
        super().__init__(home, "server.log")
        self._port = _find_free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._database = database
        self._auth = auth

    @property
    def has_password(self) -> bool:
        """Whether it asks its clients for a password."""
        return self._auth is not None

    def launch(self) -> None:
        """Starts its process, without waiting for it to answer. Raises ConfigurationError where the port is taken."""
        check_proxies()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise ConfigurationError(f"port {self._port} is taken{_describe_port_owner(self._port)}")
        create_prefect_home(self._home)
        environment = self._environment()
        environment.pop("PREFECT_API_URL", None)
        environment.setdefault("PREFECT_SERVER_UI_API_URL", self.url)  # or the UI asks port 4200
        if self._database is not None:
            environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self._database
        if self._auth is not None:
            environment["PREFECT_SERVER_API_AUTH_STRING"] = self._auth
        environment |= build_origin_settings(self._port)
        self._launch("uvicorn", *self._build_options(), environment=environment)

    def _build_options(self) -> list[str]:
        """The options of uvicorn that `prefect server start` sets, with our application in the place of Prefect's."""
        settings = get_current_settings().server
        options = {
            # No module is taken from the working directory; and it is one server, whatever WEB_CONCURRENCY says.
            "--app-dir": APP_DIR,
            "--workers": 1,
            "--host": "127.0.0.1",
            "--port": self._port,
            "--log-level": settings.logging_level.lower(),
            "--timeout-keep-alive": settings.api.keepalive_timeout,
            "--ws-ping-interval": settings.api.websocket_ping_interval,
            "--ws-ping-timeout": settings.api.websocket_ping_timeout,
        }
        words = (str(word) for option in options.items() for word in option)
        return ["--factory", FACTORY, *words]

    def __enter__(self) -> Self:
        self.launch()
        try:
            self.wait_until_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_until_ready(self) -> None:
        """Returns when it answers. Raises ConfigurationError where it ends instead, or takes too long."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.HTTPError):
                # It has no TLS: to read the certificates for one call takes a processor for 25 ms.
                if httpx.get(f"{self.url}/health", timeout=2.0, verify=False).status_code == 200:
                    return
            time.sleep(0.1)
        reason = read_failure_reason(self.log, self._log_offset)
        raise ConfigurationError(f"the Prefect server did not start: {reason} (its log is {self.log})")

    def end(self) -> None:
        """Ends it, whatever it is doing; one that has ended is no error."""
        process, self._process = self._process, None
        if process is not None:
            end_process(process)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _describe_port_owner(port: int) -> str:
    """Who listens on the port, as far as it can be known, and what to do."""
    url = f"http://127.0.0.1:{port}"
    with suppress(httpx.HTTPError):
        if httpx.get(f"{url}/api/health", timeout=OWNER_TIMEOUT_SECONDS).status_code == 200:
            status = httpx.get(f"{url}/api/work_pools/{WORK_POOL}", timeout=OWNER_TIMEOUT_SECONDS).status_code
            if status == httpx.codes.UNAUTHORIZED:
                return (
                    f" by a Prefect server that asks for a password: use it with PREFECT_API_URL={url}/api and "
                    "PREFECT_API_AUTH_STRING=NAME:PASSWORD, or end it, or name another port"
                )
            ours = status == 200
            what = "that rlm-batch has set up already" if ours else "that rlm-batch has not set up"
            remedy = "" if ours else " and run rlm-batch deploy"
            return (
                f" by a Prefect server {what}: use it with PREFECT_API_URL={url}/api{remedy}, or end it, or name "
                "another port"
            )
    return ": end what listens there, or name another port"
