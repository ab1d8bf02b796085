"""A server that counts executions by name."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

# The executed code calls `count_execution(name)`, which counts the name and returns its count so far.
COUNT_EXECUTION = """
import urllib.request

def count_execution(name):
    return int(urllib.request.urlopen(f"{address}/{name}", timeout=100).read())

"""


class ExecutionCounter:
    """A context manager for a server that counts each GET of /NAME and answers with the count of that name.

    While `may_go_on` is cleared, counted requests wait for it, up to 95 s.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        counter, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                with lock:
                    counter.counts[name] += 1
                    body = str(counter.counts[name]).encode()
                counter.may_go_on.wait(95)  # seconds, less than the client's time-out
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
