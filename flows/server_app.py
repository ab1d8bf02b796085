"""Prefect's server with our guard around it: what uvicorn serves in the servers that rlm-batch starts."""

import os
import subprocess
import sys
from typing import Any

from prefect.server.api.middleware import CsrfMiddleware
from prefect.server.api.server import SubprocessASGIServer, create_app
from prefect.settings import get_current_settings
from starlette.middleware import Middleware

from .origin_guard import APP_DIR, EXTERNAL, FACTORY, OriginGuard, build_origin_settings, split_origins


def create_guarded_app() -> OriginGuard:
    """Prefect's application, as its settings in this process want it, behind the guard of its CORS origins."""
    app = create_app(final=True)
    app.user_middleware = [
        Middleware(ExternalCsrfMiddleware) if middleware.cls is CsrfMiddleware else middleware
        for middleware in app.user_middleware
    ]
    return OriginGuard(app, split_origins(get_current_settings().server.api.cors_allowed_origins))


class ExternalCsrfMiddleware(CsrfMiddleware):
    """Prefect's check of tokens, for what comes from outside: the server's own automations have none (Prefect 3.8)."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        if request.scope.get(EXTERNAL):
            return await super().dispatch(request, call_next)
        return await call_next(request)


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
        environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)  # of a server for others
        command = [sys.executable, "-m", "uvicorn", "--factory", FACTORY, "--host", "127.0.0.1"]
        # As for the server of `rlm-batch up`.
        options = ["--app-dir", APP_DIR, "--workers", "1", "--port", str(self.port)]
        options += ["--log-level", "error", "--lifespan", "on"]
        return subprocess.Popen([*command, *options], env=environment)
