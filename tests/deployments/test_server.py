"""A Prefect server of our own: there while it is used, and gone with whoever used it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rlm_batch import ConfigurationError
from rlm_batch.deployments.server import PrefectServer


def test_a_port_that_is_taken_is_one_sentence(server: str, tmp_path: Path) -> None:
    port = int(server.split(":")[2].partition("/")[0])
    with pytest.raises(ConfigurationError) as refused, PrefectServer(tmp_path, port):
        pass
    assert f"port {port} is taken by a Prefect server that rlm-batch" in str(refused.value)
    assert f"PREFECT_API_URL={server}" in str(refused.value)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is taken: end what"), PrefectServer(tmp_path, port):
            pass


@pytest.mark.full
def test_the_server_ends_with_a_process_that_is_killed(no_process_left: None, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom rlm_batch.deployments.server import PrefectServer\n"
        "with PrefectServer(Path(sys.argv[1])) as server:\n    print(server.url, flush=True)\n    time.sleep(60)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    url = host.stdout.readline().strip()
    assert httpx.get(f"{url}/health").status_code == 200
    os.kill(host.pid, signal.SIGKILL)
    host.wait()
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            httpx.get(f"{url}/health", timeout=1)
        except httpx.HTTPError:
            return
        time.sleep(0.1)
    raise AssertionError("the server still answers")
