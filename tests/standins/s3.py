"""A private S3 on loopback: moto's server, which counts requests and can refuse some of them.

``python tests/standins/s3.py --pipe`` takes a JSON request per line on standard input, and ends with that input.
``reset`` leaves one empty bucket and refuses nothing. ``requests`` returns the requests since the last call, each as
method, path and query. ``refuse`` answers requests of these methods with 403, as for expired keys, until the next
``refuse`` or ``reset``.
"""

import json
import os
import sys
import threading

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.dirname(os.path.realpath(__file__))]

from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import S3Backend
from werkzeug.serving import WSGIRequestHandler, make_server

ACCOUNT = "123456789012"


class Quiet(WSGIRequestHandler):
    """A request handler that logs no requests."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class Watched:
    """The application, with its recorded requests and its refused methods."""

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self.requests: list[str] = []
        self.refused: list[str] = []

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        self.requests.append(f"{method} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}")
        if method in self.refused:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"]
        return self._application(environ, start_response)


def main() -> None:
    """Serve until standard input ends."""
    watched = Watched()
    server = make_server("127.0.0.1", 0, watched, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"url": f"http://127.0.0.1:{server.port}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        backend: S3Backend = get_backend("s3")[ACCOUNT]["aws"]
        if request["op"] == "reset":
            watched.refused = []
            backend.reset()
            backend.create_bucket("results", "us-east-1")
        elif request["op"] == "refuse":
            watched.refused = request["methods"]
        asked, watched.requests = watched.requests, []
        print(json.dumps({"value": asked}), flush=True)


if __name__ == "__main__":
    main()
