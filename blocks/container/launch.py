"""The start of a container: its first process reads its payload from standard input and becomes the driver."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...sandbox.driver_bundle import PackedDriver
from ...sandbox.errors import SandboxStartError
from ..host_files.cache import make_once, resolve_cache_root
from ..subprocess_runner import run_command

CWD = "/tmp/sandbox"  # /tmp's size limit covers the clone and the host's files, too.
ARCHIVE_PIECE_BYTES = 1 << 20

# A program for `python3 -c`. Its standard input has the driver, the host's files and then the first frame. A child
# process unpacks the files, because unpacking imports modules that the driver does not need. The first process of a
# namespace ignores signals without a handler, so the program sets a handler for SIGALRM.
BOOT = """
import sys

sys.path[:] = [path for path in sys.path if path]  # before a module of the working directory is imported
import os, signal

signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
signal.alarm({seconds})

class Part:
    def __init__(self, size):
        self.rest = size

    def read(self, size=-1):
        data = []
        size = self.rest if size < 0 else min(size, self.rest)
        while size:
            data.append(os.read(0, size))
            size -= len(data[-1]) or os._exit(1)
            self.rest -= len(data[-1])
        return b"".join(data)

data = Part({driver}).read()
os.makedirs({cwd!r}, exist_ok=True)
if {modules} or {repository}:
    pid = os.fork()
    if pid == 0:
        try:
            import io, tarfile, zipfile
            if {modules}:
                zipfile.ZipFile(io.BytesIO(Part({modules}).read())).extractall("/")
            if {repository}:
                part = Part({repository})
                tarfile.open(fileobj=part, mode="r|").extractall({cwd!r})
                part.read()
        except BaseException as error:
            os.write(2, f"the host's files could not be unpacked: {{error}}\\n".encode())
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        os._exit(1)
signal.alarm(0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
os.chdir({cwd!r})
{loader}
found["main"]()
"""


@dataclass(frozen=True)
class Payload:
    """The input of a container before the first frame: the driver and archives of modules and of a repository."""

    driver: PackedDriver
    modules: bytes | None = None
    repository: Path | None = None

    def build_boot_program(self, seconds: int) -> str:
        """Build the program that reads the payload. The program ends if this takes longer than `seconds`."""
        return BOOT.format(
            seconds=seconds,
            driver=len(self.driver.data),
            modules=len(self.modules or b""),
            repository=0 if self.repository is None else self.repository.stat().st_size,
            cwd=CWD,
            loader=self.driver.loader,
        )

    def read_pieces(self) -> Iterator[bytes]:
        """Yield the payload, in pieces so that a large repository does not fill the memory."""
        yield self.driver.data + (self.modules or b"")
        if self.repository is not None:
            with self.repository.open("rb") as file:
                while piece := file.read(ARCHIVE_PIECE_BYTES):
                    yield piece


async def pack_repository(clone: Path) -> Path:
    """Return an archive of a clone, created once in the cache. Raise SandboxStartError or ConfigurationError."""

    async def pack(folder: Path) -> None:
        done = await run_command("tar", "-C", str(clone), "-cf", str(folder / "repository.tar"), ".")
        if done.returncode:
            raise SandboxStartError(f"the repository could not be packed for containers: {done.stderr.strip()[-1000:]}")

    place = resolve_cache_root() / "repository-archives" / clone.parent.name / clone.name
    return await make_once(place, pack) / "repository.tar"
