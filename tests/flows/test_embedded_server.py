"""The server that a flow run brings along where none is configured: it is there for the run, and for no web page."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from ..infra.csrf import get_csrf_headers
from ..infra.prefect_database import make_prefect_home

# Prints the server's address while an execution is under way, and its result once the file `go` is there.
PROGRAM = """
import asyncio, pathlib, sys
from rlm_batch import batch

CODE = '''
import pathlib, time
(folder := pathlib.Path(path)).joinpath("begun").touch()
while not folder.joinpath("go").exists():
    time.sleep(0.05)
SUBMIT(seen=True)
'''

async def main(folder):
    running = asyncio.create_task(batch(CODE, [{"path": str(folder)}], provider="local:none"))
    while not folder.joinpath("begun").exists() and not running.done():
        await asyncio.sleep(0.05)
    from prefect.server.api.server import SubprocessASGIServer
    print(SubprocessASGIServer().api_url, flush=True)
    print((await running)[0].seen, flush=True)

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server of a flow run that goes on meanwhile, and that gets its result after all."""
    folder = make_prefect_home(tmp_path_factory.mktemp("embedded"))
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {
        "PREFECT_HOME": str(folder),
        "RLM_BATCH_RESULTS": str(folder / "results"),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "https://allowed.example",
    }
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        yield program.stdout.readline().strip()
        (folder / "go").touch()
        assert program.communicate(timeout=90)[0].strip() == "True"
    finally:
        with suppress(ProcessLookupError):
            program.kill()
        program.wait()


# One test: four processes of tests would start four servers for four. The guard itself is tested by the server that
# has been started already (tests/deployments/test_server.py); this one takes 14 s of a processor to start.
@pytest.mark.full
def test_it_is_closed_to_web_pages_but_those_that_a_person_allows(embedded: str) -> None:
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
        headers = {**get_csrf_headers(embedded), "Origin": origin}
        assert httpx.post(f"{embedded}/flows/", json={"name": "evil"}, headers=headers, timeout=60).status_code == 403
        assert httpx.get(f"{embedded}/admin/version", headers=headers, timeout=60).status_code == 403
    own = get_csrf_headers(embedded)
    assert httpx.post(f"{embedded}/flows/filter", json={}, headers=own, timeout=60).json()[0]["name"] != "evil"
    allowed = httpx.get(f"{embedded}/admin/version", headers={"Origin": "https://allowed.example"}, timeout=60)
    assert allowed.headers["access-control-allow-origin"] == "https://allowed.example"

    # It goes by no other name.
    assert httpx.get(f"{embedded}/admin/version", timeout=60).is_success
    assert httpx.get(f"{embedded}/admin/version", headers={"Host": "evil.example"}, timeout=60).status_code == 403

    # Whoever changes something needs a token.
    assert httpx.post(f"{embedded}/flows/", json={"name": "x"}, timeout=60).status_code == 403

    # Its web sockets are closed to pages and open to programs.
    address = embedded.replace("http", "ws", 1) + "/events/out"
    with pytest.raises(InvalidStatus), connect(address, origin=Origin("http://evil.example")):
        pass
    with connect(address):
        pass
