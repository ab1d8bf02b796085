"""Targets on the host for code in sandboxes: files, processes and servers; and marks that find leftover processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...infra.waiting import wait_until
from .hosts import ENVIRONMENT_SECRET, Host

FILE_SECRET = "of the file"


class Marked:
    """Processes with a unique name (PR_SET_NAME), which their forks inherit."""

    def __init__(self) -> None:
        self.mark = "rlm-" + os.urandom(5).hex()  # a name has at most 15 characters

    def pids(self) -> list[int]:
        """List the live processes with the mark, in every namespace."""
        living: list[int] = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if self.mark not in Path(f"/proc/{name}/comm").read_text():
                        continue
                    status = Path(f"/proc/{name}/status").read_text()
                except OSError:
                    continue  # the process ended meanwhile
                # A process with other threads looks like a zombie when its first thread has ended.
                has_ended = "\nState:\tZ" in status and re.search("\nThreads:\t[01]\n", status)
                if not has_ended:
                    living.append(int(name))
        return living

    def wait_for(self, count: int = 1) -> None:
        """Wait until at least `count` processes carry the mark at the same moment."""
        wait_until(lambda: len(self.pids()) >= count, f"{count} processes with the mark")

    def wait_until_gone(self) -> None:
        """Wait until no process carries the mark."""
        # Check twice: the first check may miss a process that has just forked its successor.
        wait_until(lambda: not self.pids() and not self.pids(), "no process with the mark")


@dataclass(frozen=True)
class Files:
    """Files of the host's user. Any user may read and write them, so only isolation can stop the code."""

    home: Path  # a file in the home directory
    tmp: Path  # a file below /tmp or the directory used instead
    folder: Path  # a directory where any user may create files

    def paths(self) -> dict[str, str]:
        """Return the two files as variables of an execution."""
        return {"home": str(self.home), "tmp": str(self.tmp)}


class Victim:
    """A process of the host's user that does nothing."""

    def __init__(self, host: Host) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "echo; while :; do sleep 600; done"],
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"HOST_SECRET": ENVIRONMENT_SECRET},
            **host.as_user(),
        )
        assert self._process.stdout is not None
        self._process.stdout.read(1)
        self.pid = self._process.pid

    @property
    def is_untouched(self) -> bool:
        """Return True if the process is stopped without a pending signal. `kill` returns after it sets the signal."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return "\nState:\tT" in status and len(re.findall("(?m)^S[ih][gd]Pnd:\t0{16}$", status)) == 2

    def stop(self) -> None:
        """Stop the process."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: self.is_untouched, "the victim is stopped")

    def go_on(self) -> None:
        """Continue the process."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill the process."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()


class Servers:
    """Servers on the host that record connections and data. All but the TCP and UDP servers use Unix sockets."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, Any] = {}
        self._sockets: dict[str, socket.socket] = {}
        unique = os.urandom(6).hex()
        places = {"path": str(folder / "{}.socket"), "abstract": "\0" + unique + "{}"}
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            word = "stream" if kind == socket.SOCK_STREAM else "datagram"
            for place, address in places.items():
                self._listen(f"{place} {word}", socket.AF_UNIX, kind, address.format(word))
            self._listen("tcp" if word == "stream" else "udp", socket.AF_INET, kind, ("127.0.0.1", 0))

    def _listen(self, name: str, family: int, kind: int, address: Any) -> None:
        server = self._sockets[name] = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen(8)
        server.setblocking(False)
        bound = server.getsockname()
        self.names[name] = bound.decode() if isinstance(bound, bytes) else bound
        if isinstance(address, str) and address.startswith("/"):
            os.chmod(address, 0o777)

    def list_reached(self) -> set[str]:
        """Return the names of the servers that were reached."""
        names: set[str] = set()
        for name, server in self._sockets.items():
            try:
                if server.type == socket.SOCK_STREAM:
                    server.accept()[0].close()
                else:
                    server.recv(100)
                names.add(name)
            except BlockingIOError:
                pass
        return names

    def close(self) -> None:
        """Stop serving."""
        for server in self._sockets.values():
            server.close()
