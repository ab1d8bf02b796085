"""A stand-in for Modal on loopback: its control plane and its command router, for the unmodified client.

By hand, ``python tests/standins/modal.py`` prints the environment to export and serves until Ctrl-C. Tests start it
with ``--pipe``: it then takes a JSON request per line on standard input (see `Standin.ask_`), answers on standard
output, and ends with that input.

It is built on the protocol classes of the installed client. Modelled: sandboxes of both backends with a root directory
of their own, where real processes run; commands with binary streams, replayable by offset; lifetimes and idle
timeouts; volumes that a sandbox sees as they were when it was created, with what it wrote visible to others from the
commit on (``sync MOUNT`` inside, or the sandbox's end); images that are built once, whose ``pip install`` is real and
whose other commands are not run; tags, names, lists, tokens, idempotency keys; throttling and quotas. A command has a
process namespace of its own, which Modal's does not have.

Without bubblewrap there are no directories of their own: commands run in the machine's own file system, and a sandbox
that asks for a volume is refused. Set the block's ``workdir`` to a directory that may be made.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import string
import sys
import tempfile
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.dirname(os.path.realpath(__file__))]

import grpclib.const
from grpclib import GRPCError, Status
from grpclib.server import Server, Stream
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

Result = api_pb2.GenericResult
PIECE = 256 * 1024  # bytes of output in one message
PAGE = 50  # sandboxes in one page of a list
TOKEN_SECONDS = 3600.0
FS_TOOLS = "/__modal/.bin/modal-sandbox-fs-tools"
# The GPUs of modal.com/docs/guide/gpu, and its older names; the words that Modal refuses others with are not known.
GPUS = {
    *("", "ANY", "T4", "L4", "A10", "A10G", "A100", "A100-40GB", "A100-80GB", "L40S", "RTX-PRO-6000"),
    *("H100", "H100!", "H200", "B200", "B200+"),
}
REGIONS = ("us", "eu", "ap", "uk", "ca", "me", "sa", "af", "mx")  # each alone, or with more after a hyphen
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")
PR_SET_PDEATHSIG = 1

# What stands for Modal's own `sync` in a sandbox: for a volume's mount it commits and waits, else it does nothing.
SYNC = """#!{python} -IS
import os, socket, sys
for mount in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect({socket!r})
        line.sendall(("{box} " + os.path.abspath(mount) + "\\n").encode())
        answer = line.makefile().readline().strip()
    if answer != "ok":
        sys.exit("sync: " + (answer or "no answer"))
"""

# What stands for the program that the client's file calls run.
TOOLS = """#!{python} -IS
import json, os, shutil, sys
kinds = {{FileNotFoundError: "NotFound", IsADirectoryError: "IsDirectory", NotADirectoryError: "NotDirectory",
         PermissionError: "PermissionDenied", FileExistsError: "AlreadyExists"}}
(name, options), = json.loads(sys.argv[1]).items()
try:
    path = options["path"]
    if name == "WriteFile":
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    elif name == "ReadFile":
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    else:
        sys.exit(json.dumps({{"error_kind": "Other", "message": name + " is not modelled"}}))
except OSError as error:
    sys.exit(json.dumps({{"error_kind": kinds.get(type(error), "Other"), "message": error.strerror or str(error)}}))
"""


def python() -> str:
    """The base Python, which needs no virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def token(**claims: Any) -> str:
    """A JSON web token; its signature is not a real one."""
    parts = [{"alg": "none"}, {"exp": time.time() + TOKEN_SECONDS, **claims}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, "c2ln"])


def claims(text: str) -> dict[str, Any]:
    """What a token says."""
    part = text.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def throttled(message: str, retry_after: float | None) -> GRPCError:
    """A refusal that asks the client to wait, or with None one that does not."""
    details = [] if retry_after is None else [api_pb2.RPCRetryPolicy(retry_after_secs=retry_after)]
    return GRPCError(Status.RESOURCE_EXHAUSTED, message, details)


# ------------------------------------------------------------------------------------------------------------- volumes


class Volume:
    """What has been committed, and by whom."""

    def __init__(self, number: str, name: str, version: int, folder: Path) -> None:
        self.id, self.name, self.version, self.folder = number, name, version, folder
        self.lock = threading.Lock()
        folder.mkdir(parents=True)


class Mount:
    """A sandbox's own copy of a volume."""

    def __init__(self, volume: Volume, path: str, folder: Path, read_only: bool) -> None:
        self.volume, self.path, self.folder, self.read_only = volume, path, folder, read_only
        with volume.lock:
            shutil.copytree(volume.folder, folder, symlinks=True)
        self._seen = self._state(folder)

    @staticmethod
    def _state(folder: Path) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                stat = path.lstat()
                if not path.is_dir() or path.is_symlink():
                    found[str(path.relative_to(folder))] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found

    @staticmethod
    def _put(source: Path, folder: Path, name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")  # where nobody looks for files
        shutil.copy2(source, beside, follow_symlinks=False)
        os.replace(beside, target)

    def commit(self) -> list[str]:
        """Pushes what was written here since the last time; the last writer of a file wins."""
        with self.volume.lock:
            now = self._state(self.folder)
            changed = sorted(name for name, state in now.items() if self._seen.get(name) != state)
            if not self.read_only:
                for name in changed:
                    with contextlib.suppress(FileNotFoundError):  # it went while we looked
                        self._put(self.folder / name, self.volume.folder, name)
                for name in self._seen.keys() - now.keys():
                    (self.volume.folder / name).unlink(missing_ok=True)
            self._seen = now
            return changed

    def reload(self) -> None:
        """Fetches what others have committed, over all that has not been written here since."""
        with self.volume.lock:
            seen, now, theirs = self._seen, self._state(self.folder), self._state(self.volume.folder)
            mine = {name for name, state in now.items() if seen.get(name) != state}
            mine |= seen.keys() - now.keys()  # removed here, which is a change too
            for name in theirs.keys() - mine:
                self._put(self.volume.folder / name, self.folder, name)
            for name in now.keys() - theirs.keys() - mine:
                (self.folder / name).unlink(missing_ok=True)
            fresh = self._state(self.folder)
            unchanged = {name: state for name, state in fresh.items() if name not in mine}
            self._seen = unchanged | {name: seen[name] for name in mine if name in seen}


# ----------------------------------------------------------------------------------------------------------- sandboxes


class Output:
    """A stream that can be read from any offset, also after its end."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Command:
    """One command in a sandbox."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.outputs = {1: Output(), 2: Output()}
        self.written = 0  # bytes of standard input that it was given
        self.writing = asyncio.Lock()
        self.status: int | None = None
        self.ended = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self._pump(process.stdout, self.outputs[1])),
            asyncio.create_task(self._pump(process.stderr, self.outputs[2])),
        ]

    @staticmethod
    async def _pump(source: asyncio.StreamReader | None, output: Output) -> None:
        assert source is not None
        try:
            while data := await source.read(PIECE):
                output.data += data
                output.notify()
        finally:
            output.ended = True
            output.notify()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Box:
    """One sandbox."""

    def __init__(self, request: Any, folder: Path, v2: bool) -> None:
        definition = request.definition
        letters = string.ascii_letters + string.digits
        if v2:
            self.id, self.task = f"sb-{secrets.token_hex(16)}", f"ta-{secrets.token_hex(11)}V"
        else:
            self.id, self.task = (
                "sb-" + "".join(secrets.choice(letters) for _ in range(22)),
                f"ta-{secrets.token_hex(11)}",
            )
        self.app, self.name, self.workdir = request.app_id, definition.name, definition.workdir
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.timeout, self.idle_timeout = definition.timeout_secs, definition.idle_timeout_secs
        self.created, self.idle_since = time.time(), time.monotonic()
        self.offline = definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        self.image = definition.image_id
        self.definition = str(definition)
        self.folder = folder
        self.mounts: list[Mount] = []
        self.commands: dict[str, Command] = {}
        self.status = Result.GENERIC_STATUS_UNSPECIFIED
        self.ended = asyncio.Event()
        self.ending = False
        self.ready_at = time.monotonic()

    def result(self) -> Any:
        return Result(status=self.status)


class Standin:
    """Everything that both servers share."""

    def __init__(self, root: Path, bubblewrap: str | None) -> None:
        self.root, self.bubblewrap = root, bubblewrap
        self.token_id, self.token_secret = f"ak-{secrets.token_hex(8)}", f"as-{secrets.token_hex(16)}"
        self.router_url = ""
        self.options: dict[str, Any] = {
            "boot_delay": 0.0,  # seconds from a sandbox's creation to its first command
            "creations_per_second": None,
            "creation_burst": 1,
            "max_sandboxes": None,
            "commit_at_end": True,
            "commit_error": "",  # what `sync` complains of
            "python": python(),  # what is `python` in a sandbox, empty for none
        }
        self.rules: list[dict[str, Any]] = []
        self.chance = random.Random(0)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.events: list[dict[str, Any]] = []
        self.peak = 0
        self.boxes: dict[str, Box] = {}
        self.tasks: dict[str, Box] = {}
        self.ended: dict[str, Box] = {}
        self.apps: dict[str, str] = {}
        self.volumes: dict[str, Volume] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, asyncio.Future[Any]] = {}
        self.streams: set[Any] = set()
        self.tokens = 0.0
        self.filled_at = time.monotonic()
        self._watches: set[asyncio.Task[None]] = set()

    # -- what tests ask

    def ask(self, request: dict[str, Any]) -> Any:
        """Answers a request of the tests: its `op` is the name of a method below, the rest its arguments."""
        arguments = {name: value for name, value in request.items() if name != "op"}
        return getattr(self, "ask_" + request["op"])(**arguments)

    def ask_state(self) -> dict[str, Any]:
        """What is alive, how often each call came and how often a fault answered it, and what was committed."""
        return {
            "sandboxes": {
                box.id: {
                    "name": box.name,
                    "tags": box.tags,
                    "timeout": box.timeout,
                    "idle_timeout": box.idle_timeout,
                    "definition": box.definition,
                }
                for box in self.boxes.values()
            },
            "counts": dict(self.counts),
            "faults": dict(self.faults),
            "events": self.events,
            "peak": self.peak,
            "images": {number: image["commands"] for number, image in self.images.items()},
            "folders": sorted(path.name for path in (self.root / "sandboxes").iterdir()),
            "commands": [
                command.process.pid
                for box in self.boxes.values()
                for command in box.commands.values()
                if not command.ended.is_set()
            ],
        }

    def ask_faults(self, rules: list[dict[str, Any]], seed: int = 0) -> None:
        """Replaces the rules: `method` (a pattern), `status`, `probability` or `times`, `after` (the call is carried
        out and its answer lost), `delay` (seconds), `retry_after` (seconds), `drop` (the connection)."""
        self.rules, self.chance = rules, random.Random(seed)

    def ask_set(self, **options: Any) -> None:
        """Changes options."""
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise ValueError(f"no options: {unknown}")
        self.options.update(options)

    def ask_reset(self) -> None:
        """Forgets the counts, the events, the rules and the options."""
        for found in (self.counts, self.faults, self.events):
            found.clear()
        self.rules, self.peak = [], len(self.boxes)
        fresh = Standin(self.root, None).options
        self.options.update(fresh)

    def ask_volume(self, name: str, version: int = 2) -> dict[str, str]:
        """A volume's committed files; it is made where there is none."""
        volume = self.volume(name, version)
        files = (path for path in volume.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(volume.folder)): path.read_bytes().decode("latin-1") for path in files}

    def ask_drop(self) -> None:
        """Breaks off every connection that output is read over."""
        for stream in list(self.streams):
            stream._stream.connection._transport.abort()

    async def ask_end(self, sandbox: str) -> None:
        """Ends a sandbox as its provider would, without being asked by its owner."""
        await self.end(self.boxes[sandbox], Result.GENERIC_STATUS_TERMINATED)

    # -- sandboxes

    def volume(self, name: str, version: int) -> Volume:
        for volume in self.volumes.values():
            if volume.name == name:
                return volume
        number = f"vo-{secrets.token_hex(11)}"
        volume = self.volumes[number] = Volume(number, name, version, self.root / "volumes" / number)
        return volume

    def admit(self) -> None:
        """Lets one creation through, or raises what the limits say."""
        rate, limit = self.options["creations_per_second"], self.options["max_sandboxes"]
        if limit is not None and len(self.boxes) >= limit:
            raise throttled(f"Workspace limit of {limit} concurrent sandboxes reached.", None)
        if rate is not None:
            now = time.monotonic()
            self.tokens = min(self.options["creation_burst"], self.tokens + (now - self.filled_at) * rate)
            self.filled_at = now
            if self.tokens < 1:
                raise throttled("Sandbox creation rate limit exceeded.", (1 - self.tokens) / rate)
            self.tokens -= 1

    async def create(self, request: Any, v2: bool) -> Box:
        self.admit()
        if request.definition.image_id not in self.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.definition.image_id} not found")
        kind = request.definition.resources.gpu_config.gpu_type
        if kind not in GPUS:
            raise GRPCError(Status.INVALID_ARGUMENT, f"Unknown GPU type {kind!r}")
        for region in request.definition.scheduler_placement.regions:
            if region.partition("-")[0] not in REGIONS:
                raise GRPCError(Status.INVALID_ARGUMENT, f"Unknown region {region!r}")
        name = request.definition.name
        if name and any(box.name == name and box.app == request.app_id for box in self.boxes.values()):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {name} already exists")
        box = Box(request, self.root / "sandboxes" / secrets.token_hex(6), v2)
        if request.definition.volume_mounts and not self.bubblewrap:
            raise GRPCError(Status.FAILED_PRECONDITION, "Volumes need bubblewrap on the stand-in's machine")
        box.folder.mkdir(parents=True)
        (box.folder / "root").mkdir()
        for path in filter(os.path.islink, SYSTEM):
            (box.folder / "root" / path[1:]).symlink_to(os.readlink(path))
        for number, mount in enumerate(request.definition.volume_mounts):
            volume = self.volumes[mount.volume_id]
            folder = box.folder / f"volume-{number}"
            box.mounts.append(await asyncio.to_thread(Mount, volume, mount.mount_path, folder, mount.read_only))
        self._tools(box)
        box.ready_at = time.monotonic() + self.options["boot_delay"]
        self.boxes[box.id] = self.tasks[box.task] = box
        self.peak = max(self.peak, len(self.boxes))
        watch = asyncio.create_task(self._watch(box))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return box

    def _tools(self, box: Box) -> None:
        folder = box.folder / "bin"
        folder.mkdir()
        programs = {
            "sync": SYNC.format(python=python(), socket=str(self.root / "commits"), box=box.id),
            "modal-sandbox-fs-tools": TOOLS.format(python=python()),
        }
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        if self.options["python"]:
            for name in ("python", "python3"):
                (folder / name).symlink_to(self.options["python"])

    async def _watch(self, box: Box) -> None:
        """Ends it when its time is over, or when it has been idle for too long."""
        while not box.ending:
            now, left = time.monotonic(), box.created + box.timeout - time.time()
            if any(not command.ended.is_set() for command in box.commands.values()):
                box.idle_since = now
            idle_left = box.idle_since + box.idle_timeout - now if box.idle_timeout else left
            if min(left, idle_left) <= 0:
                await self.end(box, Result.GENERIC_STATUS_TIMEOUT)
                return
            await asyncio.sleep(min(left, idle_left, 0.1))

    async def end(self, box: Box, status: Any) -> None:
        """Kills all that runs in it, commits what it wrote, and forgets it."""
        if box.ending:
            await box.ended.wait()
            return
        box.ending = True
        for command in box.commands.values():
            command.kill()
        for command in box.commands.values():
            await command.ended.wait()
        if self.options["commit_at_end"]:
            await self.commit(box, None, "end")
        await asyncio.to_thread(shutil.rmtree, box.folder, True)
        box.status = status
        self.boxes.pop(box.id, None)
        self.tasks.pop(box.task, None)
        self.ended[box.id] = box
        box.ended.set()

    async def commit(self, box: Box, path: str | None, cause: str) -> str:
        """Commits one mount or all; returns "ok" or a complaint."""
        mounts = [mount for mount in box.mounts if path is None or path == mount.path]
        for mount in mounts:
            files = await asyncio.to_thread(mount.commit)
            if files or cause == "sync":
                self.events.append({"cause": cause, "sandbox": box.id, "volume": mount.volume.name, "files": files})
        return "ok"

    async def on_sync(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What `sync` in a sandbox says."""
        number, _, path = (await reader.readline()).decode().strip().partition(" ")
        box, answer = self.boxes.get(number), self.options["commit_error"]
        self.counts["sync"] += 1
        if box is None:
            answer = "no such sandbox"
        elif not answer:
            answer = await self.commit(box, path, "sync")
        with contextlib.suppress(ConnectionError):
            writer.write(answer.encode() + b"\n")
            await writer.drain()
        writer.close()

    def of_task(self, task: str) -> Box:
        box = self.tasks.get(task)
        if box is None or box.ending:
            raise GRPCError(Status.NOT_FOUND, f"Task {task} not found: it has ended")
        return box

    def of_id(self, number: str) -> Box:
        box = self.boxes.get(number) or self.ended.get(number)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {number} not found")
        return box

    # -- commands

    async def start(self, box: Box, request: Any) -> None:
        """Starts a command; one that was started already is not started again."""
        if request.exec_id in box.commands:
            return
        environment = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", **request.env}
        environment["PATH"] = f"{self._inside(box)}:{environment['PATH']}"
        for source in getattr(request, "secret_sources", ()):  # which 1.6.0 does not have yet
            environment.update(source.env.contents)
        packages = self.images[box.image]["packages"]
        if packages:
            environment["PYTHONPATH"] = packages
        words = [FS_TOOLS if word == FS_TOOLS else word for word in request.command_args]
        where = request.workdir or box.workdir or "/root"
        if self.bubblewrap:
            words, where = [*self._wrap(box, where), *words], "/"
        else:
            words[0] = str(box.folder / "bin" / "modal-sandbox-fs-tools") if words[0] == FS_TOOLS else words[0]
            where = where if os.path.isdir(where) else str(box.folder / "root")
        box.commands[request.exec_id] = command = Command(
            await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd=where,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        )
        command.tasks.append(asyncio.create_task(self._wait(box, command, request.timeout_secs)))
        if box.ending:
            command.kill()

    def _inside(self, box: Box) -> str:
        return "/__modal/.bin" if self.bubblewrap else str(box.folder / "bin")

    def _wrap(self, box: Box, where: str) -> list[str]:
        """The sandbox's own file system: its root, the system's directories, this Python, its volumes."""
        words = [str(self.bubblewrap), "--die-with-parent", "--unshare-pid", "--cap-drop", "ALL"]
        words += ["--unshare-net"] if box.offline else []
        words += ["--bind", str(box.folder / "root"), "/"]
        for path in SYSTEM:
            if os.path.exists(path) and not os.path.islink(path):
                words += ["--ro-bind", path, path]
        for path in dict.fromkeys((sys.base_prefix, os.path.dirname(os.path.dirname(python())))):
            if not PurePosixPath(path).is_relative_to("/usr"):
                words += ["--ro-bind", path, path]
        words += ["--ro-bind", str(box.folder / "bin"), "/__modal/.bin"]
        packages = self.images[box.image]["packages"]
        words += ["--ro-bind", packages, packages] if packages else []
        words += ["--bind", str(self.root / "commits"), str(self.root / "commits")]
        words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--dir", "/tmp", "--dir", "/root"]
        for mount in box.mounts:
            words += ["--ro-bind" if mount.read_only else "--bind", str(mount.folder), mount.path]
        return [*words, "--dir", where, "--chdir", where]

    @staticmethod
    async def _wait(box: Box, command: Command, seconds: int) -> None:
        try:
            async with asyncio.timeout(seconds or None):
                await command.process.wait()
        except TimeoutError:
            command.kill()
        command.status = await command.process.wait()
        command.kill()  # what it left behind in its group
        await asyncio.wait(command.tasks[:2], timeout=1.0)
        box.idle_since = time.monotonic()
        command.ended.set()

    async def build(self, number: str, definition: Any) -> None:
        """Builds an image: what it installs with pip is installed."""
        image = self.images[number]
        bases = [self.images[base.image_id] for base in definition.base_images]
        inherited = next((base["packages"] for base in bases if base["packages"]), "")
        folder = self.root / "images" / number
        complaint = ""
        for line in definition.dockerfile_commands:
            image["commands"].append(line)
            if line.startswith("FROM ") and "does-not-exist" in line:
                complaint = f"{line[5:]}: manifest unknown"
            if "pip install" in line and "--upgrade" not in line:
                if inherited and not folder.exists():
                    await asyncio.to_thread(shutil.copytree, inherited, folder)
                folder.mkdir(parents=True, exist_ok=True)
                requirements = line.partition("pip install ")[2]
                process = await asyncio.create_subprocess_shell(
                    f"exec {sys.executable} -m pip install --quiet --disable-pip-version-check --no-index --no-deps "
                    f"--target {folder} {requirements}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
                _, said = await process.communicate()
                if process.returncode:
                    complaint = said.decode("utf-8", "replace").strip() or f"pip ended with {process.returncode}"
        image["packages"] = str(folder) if folder.exists() else inherited
        if complaint:
            image["result"] = Result(status=Result.GENERIC_STATUS_FAILURE, exception=complaint)
        else:
            image["result"] = Result(status=Result.GENERIC_STATUS_SUCCESS)
        image["built"].set()

    # -- calls

    async def before(self, name: str, stream: Any) -> dict[str, Any] | None:
        """Counts a call, and applies the first rule that hits: returns it if it strikes after the call."""
        self.counts[name] += 1
        for rule in self.rules:
            if not re.fullmatch(rule.get("method", ".*"), name) or rule.get("times", 1) <= 0:
                continue
            if self.chance.random() >= rule.get("probability", 1.0):
                continue
            if "times" in rule:
                rule["times"] -= 1
            self.faults[name] += 1
            if rule.get("delay"):
                await asyncio.sleep(rule["delay"])
            if rule.get("after"):
                return rule
            self.strike(rule, stream)
            return None
        return None

    @staticmethod
    def strike(rule: dict[str, Any], stream: Any) -> None:
        """Fails a call as the rule says."""
        if rule.get("drop"):
            stream._stream.connection._transport.abort()
            raise asyncio.CancelledError
        if rule.get("status"):
            retry_after = rule.get("retry_after")
            details = [] if retry_after is None else [api_pb2.RPCRetryPolicy(retry_after_secs=retry_after)]
            raise GRPCError(Status[rule["status"]], f"injected {rule['status']}", details)

    async def once(self, key: str | None, call: Any) -> Any:
        """Carries a call out once for each idempotency key."""
        if key is None:
            return await call()
        if key not in self.answers:
            task = self.answers[key] = asyncio.ensure_future(call())
            task.add_done_callback(lambda done: done.exception() and self.answers.pop(key, None))
        return await asyncio.shield(self.answers[key])

    def authorize(self, metadata: Any) -> None:
        given = metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")
        if given != (self.token_id, self.token_secret):
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID or secret is invalid.")


def unary(handler: Any) -> Any:
    """A handler of one request and one answer, with counts, faults, tokens and idempotency around it."""

    @functools.wraps(handler)
    async def serve(self: Any, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        after = await self.standin.before(handler.__name__, stream)
        self.authorize(stream.metadata, request)
        key = stream.metadata.get("x-idempotency-key")
        answer = await self.standin.once(key, lambda: handler(self, request))
        if after is not None:
            self.standin.strike(after, stream)
        await stream.send_message(answer)

    return serve


def only_what_is_modelled(base: type) -> Any:
    """A class decorator: calls that the class does not have are answered UNIMPLEMENTED by the server itself."""

    def decorate(cls: Any) -> Any:
        missing = set(cls.__abstractmethods__)
        cls.__abstractmethods__ = frozenset()

        def mapping(self: Any) -> dict[str, grpclib.const.Handler]:
            found = base.__mapping__(self)  # type: ignore[attr-defined]
            return {path: handler for path, handler in found.items() if path.rpartition("/")[2] not in missing}

        cls.__mapping__ = mapping
        return cls

    return decorate


@only_what_is_modelled(ModalClientBase)
class ControlPlane(ModalClientBase):
    """What the client calls at MODAL_SERVER_URL."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin

    def authorize(self, metadata: Any, _request: Any) -> None:
        self.standin.authorize(metadata)

    @unary
    async def ClientHello(self, _request: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    @unary
    async def AuthTokenGet(self, _request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=token())

    @unary
    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-standin", metadata=metadata)

    @unary
    async def AppGetOrCreate(self, request: Any) -> Any:
        apps = self.standin.apps
        if request.app_name not in apps and not request.object_creation_type:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_name} not found")
        number = apps.setdefault(request.app_name, f"ap-{secrets.token_hex(11)}")
        return api_pb2.AppGetOrCreateResponse(app_id=number, handle_metadata=api_pb2.AppHandleMetadata(app_id=number))

    @unary
    async def VolumeGetOrCreate(self, request: Any) -> Any:
        volume = self.standin.volume(request.deployment_name, request.version or api_pb2.VOLUME_FS_VERSION_V1)
        metadata = api_pb2.VolumeMetadata(version=volume.version, name=volume.name)  # type: ignore[arg-type]
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=volume.id,
            version=volume.version,  # type: ignore[arg-type]
            metadata=metadata,
        )

    @unary
    async def ImageGetOrCreate(self, request: Any) -> Any:
        digest = hashlib.sha256(request.image.SerializeToString(deterministic=True)).hexdigest()
        number, images = f"im-{digest[:22]}", self.standin.images
        if number not in images or images[number]["result"].status == Result.GENERIC_STATUS_FAILURE:
            images[number] = {"commands": [], "packages": "", "result": Result(), "built": asyncio.Event()}
            images[number]["task"] = asyncio.create_task(self.standin.build(number, request.image))
        return api_pb2.ImageGetOrCreateResponse(image_id=number, result=images[number]["result"])

    async def ImageJoinStreaming(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        await self.standin.before("ImageJoinStreaming", stream)
        self.authorize(stream.metadata, request)
        image = self.standin.images[request.image_id]
        await image["built"].wait()
        await stream.send_message(api_pb2.ImageJoinStreamingResponse(result=image["result"], entry_id="1", eof=True))

    # -- sandboxes

    def _access(self, box: Box) -> Any:
        return api_pb2.CommandRouterAccess(url=self.standin.router_url, jwt=token(task=box.task))

    @unary
    async def SandboxCreateV2(self, request: Any) -> Any:
        box = await self.standin.create(request, v2=True)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=box.id,
            task_id=box.task,
            metadata=api_pb2.SandboxHandleMetadata(app_id=box.app),
            command_router_access=self._access(box),
        )

    @unary
    async def SandboxCreate(self, request: Any) -> Any:
        box = await self.standin.create(request, v2=False)
        return api_pb2.SandboxCreateResponse(sandbox_id=box.id, metadata=api_pb2.SandboxHandleMetadata(app_id=box.app))

    async def _task_id(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        if box.ending:
            return api_pb2.SandboxGetTaskIdResponse(task_result=Result(status=Result.GENERIC_STATUS_TERMINATED))
        return api_pb2.SandboxGetTaskIdResponse(task_id=box.task)

    @unary
    async def SandboxGetTaskId(self, request: Any) -> Any:
        return await self._task_id(request)

    @unary
    async def SandboxGetTaskIdV2(self, request: Any) -> Any:
        return await self._task_id(request)

    @unary
    async def TaskGetCommandRouterAccess(self, request: Any) -> Any:
        access = self._access(self.standin.of_task(request.task_id))
        return api_pb2.TaskGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)

    @unary
    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        known = self.standin.tasks.get(request.task_id) or self.standin.of_id(request.sandbox_id)
        access = self._access(known)
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)

    async def _terminate(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        await self.standin.end(box, Result.GENERIC_STATUS_TERMINATED)
        return api_pb2.SandboxTerminateResponse(existing_result=box.result())

    @unary
    async def SandboxTerminate(self, request: Any) -> Any:
        return await self._terminate(request)

    @unary
    async def SandboxTerminateV2(self, request: Any) -> Any:
        return await self._terminate(request)

    async def _wait(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout):
                await box.ended.wait()
        return api_pb2.SandboxWaitResponse(result=box.result(), metadata=api_pb2.SandboxHandleMetadata(app_id=box.app))

    @unary
    async def SandboxWait(self, request: Any) -> Any:
        return await self._wait(request)

    @unary
    async def SandboxWaitV2(self, request: Any) -> Any:
        return await self._wait(request)

    async def _tags(self, request: Any) -> Any:
        tags = self.standin.of_id(request.sandbox_id).tags
        return api_pb2.SandboxTagsGetResponse(
            tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        )

    @unary
    async def SandboxTagsGet(self, request: Any) -> Any:
        return await self._tags(request)

    @unary
    async def SandboxTagsGetV2(self, request: Any) -> Any:
        return await self._tags(request)

    @unary
    async def SandboxListV2(self, request: Any) -> Any:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = [
            box
            for box in self.standin.boxes.values()
            if not box.ending
            and (not request.app_id or box.app == request.app_id)
            and wanted.items() <= box.tags.items()
            and (not request.before_timestamp or box.created < request.before_timestamp)
        ]
        found.sort(key=lambda box: -box.created)
        return api_pb2.SandboxListResponse(
            sandboxes=[
                api_pb2.SandboxInfo(
                    id=box.id,
                    created_at=box.created,
                    app_id=box.app,
                    name=box.name,
                    metadata=api_pb2.SandboxHandleMetadata(app_id=box.app),
                )
                for box in found[:PAGE]
            ]
        )

    async def _from_name(self, request: Any, v2: bool) -> Any:
        app = self.standin.apps.get(request.app_name)
        for box in self.standin.boxes.values():
            if (box.app, box.name, box.task.endswith("V"), box.ending) == (app, request.sandbox_name, v2, False):
                return api_pb2.SandboxGetFromNameResponse(
                    sandbox_id=box.id, metadata=api_pb2.SandboxHandleMetadata(app_id=box.app)
                )
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_name} not found")

    @unary
    async def SandboxGetFromName(self, request: Any) -> Any:
        return await self._from_name(request, v2=False)

    @unary
    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        return await self._from_name(request, v2=True)


@only_what_is_modelled(TaskCommandRouterBase)
class CommandRouter(TaskCommandRouterBase):
    """What the client calls at the address that came with a sandbox."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin

    def authorize(self, metadata: Any, request: Any) -> None:
        kind, _, text = str(metadata.get("authorization", "")).partition(" ")
        if kind != "Bearer" or claims(text)["exp"] < time.time():
            raise GRPCError(Status.UNAUTHENTICATED, "the token is missing or too old")
        if claims(text)["task"] != request.task_id:
            raise GRPCError(Status.PERMISSION_DENIED, "the token is another task's")

    def _command(self, request: Any) -> tuple[Box, Command]:
        box = self.standin.of_task(request.task_id)
        if request.exec_id not in box.commands:
            raise GRPCError(Status.NOT_FOUND, f"Exec {request.exec_id} not found")
        return box, box.commands[request.exec_id]

    @unary
    async def TaskExecStart(self, request: Any) -> Any:
        box = self.standin.of_task(request.task_id)
        await asyncio.sleep(max(0.0, box.ready_at - time.monotonic()))
        await self.standin.once(f"exec {request.exec_id}", lambda: self.standin.start(box, request))
        return router_pb2.TaskExecStartResponse()

    @unary
    async def TaskExecWait(self, request: Any) -> Any:
        _, command = self._command(request)
        await command.ended.wait()
        return self._status(router_pb2.TaskExecWaitResponse, command)

    @unary
    async def TaskExecPoll(self, request: Any) -> Any:
        _, command = self._command(request)
        if not command.ended.is_set():
            return router_pb2.TaskExecPollResponse()
        return self._status(router_pb2.TaskExecPollResponse, command)

    @staticmethod
    def _status(kind: Any, command: Command) -> Any:
        assert command.status is not None
        return kind(code=command.status) if command.status >= 0 else kind(signal=-command.status)

    async def TaskExecStdioRead(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        after = await self.standin.before("TaskExecStdioRead", stream)
        self.authorize(stream.metadata, request)
        box, command = self._command(request)
        standard_error = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        output, at = command.outputs[2 if standard_error else 1], request.offset
        self.standin.streams.add(stream)
        try:
            while True:
                changed = output.changed
                if at < len(output.data):
                    data = bytes(output.data[at : at + PIECE])
                    await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data))
                    at += len(data)
                    if after is not None:
                        self.standin.strike(after, stream)
                elif output.ended:
                    if box.ending and standard_error is False:
                        raise GRPCError(Status.NOT_FOUND, "the sandbox has ended")
                    return
                else:
                    await changed.wait()
        finally:
            self.standin.streams.discard(stream)

    async def _feed(self, command: Command, offset: int, data: bytes, eof: bool) -> None:
        async with command.writing:
            if offset > command.written:
                raise GRPCError(Status.FAILED_PRECONDITION, f"offset {offset}, and {command.written} were written")
            fresh = data[command.written - offset :]
            writer = command.process.stdin
            assert writer is not None
            if command.ended.is_set():
                raise GRPCError(Status.FAILED_PRECONDITION, "the process has ended")
            try:
                if fresh:
                    command.written += len(fresh)
                    writer.write(fresh)
                    await writer.drain()
                if eof and not writer.is_closing():
                    writer.close()
            except (ConnectionError, BrokenPipeError):
                raise GRPCError(Status.FAILED_PRECONDITION, "the process has closed its input") from None

    @unary
    async def TaskExecStdinWrite(self, request: Any) -> Any:
        _, command = self._command(request)
        await asyncio.shield(self._feed(command, request.offset, request.data, request.eof))
        return router_pb2.TaskExecStdinWriteResponse()

    @unary
    async def TaskExecStdinStatus(self, request: Any) -> Any:
        _, command = self._command(request)
        writer = command.process.stdin
        closed = writer is None or writer.is_closing()
        return router_pb2.TaskExecStdinStatusResponse(num_bytes_written=command.written, closed=closed)

    async def TaskExecStdinWriteStream(self, stream: Stream[Any, Any]) -> None:
        first = await stream.recv_message()
        assert first is not None
        assert stream.metadata is not None
        after = await self.standin.before("TaskExecStdinWriteStream", stream)
        self.authorize(stream.metadata, first.start)
        _, command = self._command(first.start)
        offset = first.start.offset
        while (message := await stream.recv_message()) is not None:
            last = message.WhichOneof("payload") == "end" if "payload" in message.DESCRIPTOR.oneofs_by_name else False
            last = last or message.HasField("end")
            await self._feed(command, offset, message.data, last)
            offset += len(message.data)
            if last:
                break
        if after is not None:
            self.standin.strike(after, stream)
        await stream.send_message(router_pb2.TaskExecStdinWriteStreamResponse())

    @unary
    async def TaskReloadVolumes(self, request: Any) -> Any:
        box = self.standin.of_task(request.task_id)
        for mount in box.mounts:
            busy = await asyncio.to_thread(open_below, mount.folder)
            if busy:
                raise GRPCError(
                    Status.FAILED_PRECONDITION, f"there are open files preventing the operation: {', '.join(busy)}"
                )
            await asyncio.to_thread(mount.reload)
            self.standin.events.append({"cause": "reload", "sandbox": box.id, "volume": mount.volume.name, "files": []})
        return router_pb2.TaskReloadVolumesResponse()


def open_below(folder: Path) -> list[str]:
    """Files below a directory that some process has open."""
    # A descriptor's link names the path in the process's own mount namespace, so compare what the files are.
    inside = {(stat.st_dev, stat.st_ino): path.name for path in folder.rglob("*") if (stat := path.lstat())}
    found: list[str] = []
    for link in Path("/proc").glob("[0-9]*/fd/*") if inside else ():
        with contextlib.suppress(OSError):
            stat = link.stat()
            if (stat.st_dev, stat.st_ino) in inside:
                found.append(inside[stat.st_dev, stat.st_ino])
    return found


def die_with_parent() -> None:
    """What this process started ends with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- serving


async def serve(pipe: bool, bubblewrap: str | None) -> None:
    """Serves until standard input ends, or by hand until Ctrl-C."""
    root = Path(tempfile.mkdtemp(prefix="standin-modal-"))
    (root / "sandboxes").mkdir()
    standin = Standin(root, bubblewrap)
    servers = [
        Server([kind(standin)], status_details_codec=custom_detail_codec) for kind in (ControlPlane, CommandRouter)
    ]
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    commits = await asyncio.start_unix_server(standin.on_sync, root / "commits")
    try:
        addresses: list[str] = []
        for server in servers:
            # With its protocol named: only then does asyncio send without waiting for more.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            await server.start(sock=listening)
            addresses.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
        standin.router_url = addresses[1]
        if pipe:
            hello = {"url": addresses[0], "token_id": standin.token_id, "token_secret": standin.token_secret}
            print(json.dumps({**hello, "root": str(root), "bubblewrap": bool(bubblewrap)}), flush=True)
            requests = asyncio.create_task(listen(standin, stop))
        else:
            print(f"export MODAL_SERVER_URL={addresses[0]}")
            print(f"export MODAL_TOKEN_ID={standin.token_id} MODAL_TOKEN_SECRET={standin.token_secret}")
            print("# Ctrl-C ends it, and every sandbox in it.", flush=True)
            requests = None
        await stop.wait()
        if requests is not None:
            requests.cancel()
    finally:
        commits.close()
        for server in servers:
            server.close()
        for box in list(standin.boxes.values()):
            await standin.end(box, Result.GENERIC_STATUS_TERMINATED)
        shutil.rmtree(root, ignore_errors=True)


async def listen(standin: Standin, stop: asyncio.Event) -> None:
    """Answers the tests."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            value = standin.ask(json.loads(line))
            answer = {"value": await value if asyncio.iscoroutine(value) else value}
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    stop.set()


def main() -> None:
    """Reads the options and serves."""
    parser = argparse.ArgumentParser(description="A stand-in for Modal on this machine.")
    parser.add_argument("--pipe", action="store_true", help="take requests on standard input, and end with it")
    parser.add_argument("--no-bubblewrap", action="store_true", help="run commands in the machine's own file system")
    options = parser.parse_args()
    if options.pipe:
        die_with_parent()
    bubblewrap = None if options.no_bubblewrap else shutil.which("bwrap")
    asyncio.run(serve(options.pipe, bubblewrap))


if __name__ == "__main__":
    main()
