"""The promises of docs/isolation.md, probed by code inside a container."""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rlm_batch import CodeError, ConfigurationError, ContainerSandbox

from .conftest import run_podman

pytestmark = [pytest.mark.anyio, pytest.mark.requires("podman")]

PROBE = r"""
import os, socket, urllib.request

def attempt(action):
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__ + ": " + str(error)

def write(path):
    with open(path, "w") as file:
        file.write("x")
    return "written"

def connect(address):
    with socket.create_connection(address, timeout=2):
        return "connected"

status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
places = ("/", "/usr", "/etc", "/var/tmp", "/run", "/dev", "/proc/sys/kernel", "/sys/fs/cgroup", "/root")
SUBMIT(
    interfaces=sorted(os.listdir("/sys/class/net")),
    outside=attempt(lambda: connect((host, port))),
    names=attempt(lambda: socket.getaddrinfo("example.org", 80)),
    environment=dict(os.environ),
    refused={place: attempt(lambda: write(place + "/x")) for place in places},
    own={place: attempt(lambda: write(place + "/x")) for place in (".", "/tmp", "/dev/shm")},
    secret=attempt(lambda: open(secret).read()),
    processes=[name for name in os.listdir("/proc") if name.isdigit()],
    signal=attempt(lambda: os.kill(pid, 0)),
    uid=[os.getuid(), os.geteuid(), os.getgid()],
    capabilities=[status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    no_new_privileges=status["NoNewPrivs"],
    seccomp=status["Seccomp"],
    mount=attempt(lambda: os.unshare(0x20000) if hasattr(os, "unshare") else "no unshare"),
    hostname=socket.gethostname(),
    host=attempt(lambda: os.listdir("/proc/1/root/home")),
)
"""


async def test_the_promises_of_the_documentation_hold_in_a_container(
    container: ContainerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_HOST", "told")
    monkeypatch.setenv("HTTP_PROXY", "http://user:password@proxy.invalid")
    secret = tmp_path / "secret"
    secret.write_text("told")
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    variables = {"secret": str(secret), "pid": os.getpid(), "host": host, "port": port}
    async with server, container.interpreter() as interpreter:
        result = await interpreter.execute(PROBE, variables)
        assert interpreter.sandbox.isolation == "podman"
        assert {"namespaces", "seccomp", "user"} <= {*interpreter.sandbox.layers}
    # 1. No network.
    assert result.interfaces == ["lo"]
    assert "connected" not in result.outside
    assert "gaierror" in result.names
    # 2. None of the host's environment variables.
    assert "told" not in str(result.environment)
    assert "proxy" not in str(result.environment).lower()
    # 3. The system's files are read only. 4. Code can write to one place, which is in memory.
    assert {place: text for place, text in result.refused.items() if "written" in text} == {}
    assert {*result.own.values()} == {"written"}
    # 5. No file and no process of the host.
    assert "told" not in result.secret
    assert len(result.processes) < 6
    assert result.signal != "None" or os.getpid() < 10
    assert result.hostname == "sandbox"
    # 6. Not root, and no way to become root.
    assert 0 not in result.uid
    assert {*result.capabilities} == {"0" * 16}
    assert result.no_new_privileges == "1"
    assert result.seccomp == "2"
    assert "Error" in result.mount or result.mount == "no unshare"


READ_FIRST_PROCESS = """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
    try:
        os.kill(1, number)
    except OSError:
        pass
for name in ("mem", "fd", "environ"):
    try:
        os.listdir(f"/proc/1/{name}") if name == "fd" else open(f"/proc/1/{name}", "rb").read(1)
    except OSError:
        continue
    SUBMIT(read=name)
SUBMIT(read="")
"""
MAKE_NAMESPACES = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
refused = {}
for name, flag in (("user", 0x10000000), ("mounts", 0x20000), ("network", 0x40000000)):
    refused[name] = [libc.unshare(flag | 0x10000000), ctypes.get_errno()]
for family in (socket.AF_VSOCK, socket.AF_PACKET, 38):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        refused[str(family)] = "made"
    except OSError as error:
        refused[str(family)] = error.errno
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    SUBMIT(refused=refused, capabilities=status["CapEff"])
"""


async def test_code_cannot_read_process_one_or_create_namespaces_and_runs_the_images_python(
    container: ContainerSandbox,
) -> None:
    async with container.interpreter() as interpreter:
        assert (await interpreter.execute(READ_FIRST_PROCESS)).read == ""
        made = await interpreter.execute(MAKE_NAMESPACES)
        assert made.capabilities == "0" * 16
        assert {name: error for name, error in made.refused.items() if error not in (1, [-1, 1])} == {}
        version = await interpreter.execute("import sys; SUBMIT(version=list(sys.version_info[:3]))")
        assert version.version == list(sys.version_info[:3])
        with pytest.raises(CodeError, match="No module named 'prefect'"):
            await interpreter.execute("import prefect")


async def test_secrets_of_the_environment_are_in_no_command_line(container: ContainerSandbox) -> None:
    provider = ContainerSandbox(engine="podman", environment={"KEY": "sk-not-for-others"})  # type: ignore[arg-type]
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute("import os; SUBMIT(key=os.environ['KEY'])")).key == "sk-not-for-others"
        lines: list[bytes] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # the process ended meanwhile
                lines.append(path.read_bytes())
        assert any(interpreter.sandbox.id.encode() in line for line in lines)
        assert not any(b"sk-not-for-others" in line for line in lines)
        assert "sk-not-for-others" not in await asyncio.to_thread(run_podman, "inspect", interpreter.sandbox.id)


@pytest.mark.full  # The test waits for a registry that does not answer.
async def test_a_missing_image_or_runtime_is_an_error_before_code_runs(container: ContainerSandbox) -> None:
    with pytest.raises(ConfigurationError, match="could not pull it"):
        await container.with_options({"image": "localhost/there-is-no-such-image:1"}).open({})
    with pytest.raises(ConfigurationError, match="cannot run"):
        await ContainerSandbox(engine="podman", runtime="there-is-none").check()
