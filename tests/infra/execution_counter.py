"""A server that sandboxed code tells what it does, and that counts it."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

# What code does with it: `begun(name)` is how often that name has been told, this time included.
BEGUN = """
import urllib.request

def begun(name):
    return int(urllib.request.urlopen(f"{address}/{name}", timeout=30).read())

"""


class Counts:
    """Counts how often each name was told, by a GET of /NAME, and answers with that. A context manager."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        counts, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                with lock:
                    counts.begun[name] += 1
                    body = str(counts.begun[name]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
