"""A Git repository served over HTTP on loopback, like that of a forge."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .wheels import write_wheel

IDENTITY = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "init.defaultBranch=main")


class GitServer:
    """A repository at `url`, which requires a login once `token` is set.

    `commits` maps names to ids. The branch `main` has `first`, `tagged` (the tag v1) and `main`. The branch `side`
    continues there with `released` (the tag v2) and `side`. Each commit has its name in `here.txt` and as NAME in a
    module. It also has modules named like those that drivers and installers import; they end a process that imports
    them.

    `add_wheel` adds a package that pip downloads from here. `downloads` counts the clones and the downloads of wheels.
    Each first waits for its seconds in `delays`, or until `end_delays`.
    """

    def __init__(self, folder: Path) -> None:
        self.commits: dict[str, str] = {}
        self.token: str | None = None
        self.downloads: Counter[str] = Counter()
        self.delays: dict[str, float] = {}
        self._no_delay = threading.Event()
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        for module in ("binascii", "io", "pip", "signal", "tarfile", "zipfile"):
            (self._work / f"{module}.py").write_text("raise SystemExit('a module of the repository was imported')\n")
        self._git("init")
        for name in ("first", "tagged", "main"):
            self._add(name)
        self._git("tag", "-a", "v1", "-m", "one", self.commits["tagged"])
        self._git("checkout", "-q", "-b", "side")
        self._add("released")
        self._git("tag", "-a", "v2", "-m", "two", self.commits["released"])
        self._add("side")
        self._git("checkout", "-q", "main")
        self._served = folder / "served"
        served = self._served / "my-repo.git"
        self._git("clone", "-q", "--bare", ".", str(served))
        self._git("--git-dir", str(served), "update-server-info")
        git_server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                head, name = git_server.commits["main"], self.path.rpartition("/")[2]
                # A clone reads the object of its commit once.
                kind = "clone" if name == head[2:] else "wheel" if name.endswith(".whl") else ""
                if kind:
                    git_server.downloads[kind] += 1
                    git_server._no_delay.wait(git_server.delays.get(kind, 0.0))
                is_open = git_server.token is None or kind == "wheel"
                if is_open or self.headers.get("Authorization") == f"Basic {git_server.password}":
                    super().do_GET()
                    return
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="tests"')
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(served.parent)))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/my-repo.git"

    @property
    def password(self) -> str:
        """Return the password of a client that logs in with the token."""
        return base64.b64encode(f"x-access-token:{self.token}".encode()).decode()

    def add_wheel(self, name: str) -> str:
        """Serve the wheel of a package; return its requirement."""
        wheel = write_wheel(self._served, name)
        return f"{name} @ {self.url.removesuffix('my-repo.git')}{wheel.name}"

    def end_delays(self) -> None:
        """Answer all requests, also those that wait."""
        self.delays.clear()
        self._no_delay.set()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _git(self, *arguments: str) -> str:
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
        command = ["git", *IDENTITY, *arguments]
        done = subprocess.run(command, cwd=self._work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _add(self, name: str) -> None:
        (self._work / "here.txt").write_text(name)
        (self._work / "helper_of_the_repository.py").write_text(f"NAME = {name!r}\n")
        self._git("add", ".")
        self._git("commit", "-q", "-m", name)
        self.commits[name] = self._git("rev-parse", "HEAD")
