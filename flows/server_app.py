"""Prefect's server with our guard around it: what uvicorn serves in the servers that rlm-batch starts."""

import os
import subprocess
import sys
from typing import Any

from prefect.server.api.server import SubprocessASGIServer, create_app
from prefect.settings import get_current_settings

from .origin_guard import FACTORY, OriginGuard, build_origin_settings, split_origins


def create_guarded_app() -> OriginGuard:
    """Prefect's application, as its settings in this process want it, behind the guard of its CORS origins."""
    return OriginGuard(create_app(final=True), split_origins(get_current_settings().server.api.cors_allowed_origins))


class GuardedSubprocessServer(SubprocessASGIServer):
    """The server that Prefect embeds in a program, with the guard around it. Prefect's clients find it as its own."""

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        """Starts its process, as Prefect does but for the application and the origins."""
        assert self.port is not None
        environment = {
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
            **build_origin_settings(self.port),
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", FACTORY, "--host", "127.0.0.1"]
        options = ["--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
        return subprocess.Popen([*command, *options], env=environment)
