"""A host of local sandboxes, as a program that reads requests and writes answers, one line of JSON each.

Usage: `local_host.py SETTINGS`. The settings are JSON: `uid`, the user to become after all imports, because the user
may not be able to read the packages; `python`, an interpreter that the user can start; and the interpreter's `prefix`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import traceback
from contextvars import ContextVar
from typing import Any

from rlm_batch.blocks.local import isolation
from rlm_batch.blocks.local.launch import bubblewrap
from rlm_batch.blocks.local.provider import LocalProvider
from rlm_batch.sandbox import errors
from rlm_batch.sandbox.confinement import policy as confinement_policy
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

PR_SET_DUMPABLE = 4

# The Landlock version that a sandbox uses, or None for the kernel's version.
believed: ContextVar[int | None] = ContextVar("believed", default=None)


def landlock_abi() -> int:
    """Replace `isolation.find_landlock_abi`, so that a newer kernel can test sandboxes for an older one."""
    abi = believed.get()
    return confinement_policy.probe_landlock_abi() if abi is None else min(abi, confinement_policy.probe_landlock_abi())


async def run(interpreter: Interpreter, request: dict[str, Any]) -> dict[str, Any]:
    """Run one execution and return its outcome as JSON."""
    options = {name: request[name] for name in ("timeout", "context") if name in request}
    answer: dict[str, Any]
    try:
        result = await interpreter.execute(request["code"], request.get("variables"), **options)
        meta, answer = result.meta, {"outputs": result.outputs}
    except errors.RlmBatchError as error:
        meta, answer = error.meta, {"error": errors.error_to_json(error)}
    except Exception:  # noqa: BLE001 - the client reports any error
        return {"broken": traceback.format_exc()}
    if meta is not None:
        answer |= {"stdout": meta.stdout, "stderr": meta.stderr, "layers": meta.layers, "sandbox": meta.sandbox_id}
    return answer


class Host:
    """A host's interpreters, by the name in the client's request."""

    def __init__(self) -> None:
        self.interpreters: dict[str, Interpreter] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request: execute code, close a sandbox, or list or delete the provider's sandboxes."""
        believed.set(request.get("abi"))
        if request["op"] == "list":
            return {"found": {info.id: info.labels for info in await LocalProvider().list_sandboxes()}}
        if request["op"] == "delete":
            try:
                await LocalProvider().delete_sandbox(request["sandbox"])
            except errors.RlmBatchError:
                return {"broken": traceback.format_exc()}
            return {}
        name = request["box"]
        if request["op"] == "execute":
            if name not in self.interpreters:
                fields = {**request["fields"]}
                prepare = fields.pop("prepare", None)
                mounts = fields.pop("mounts", None)
                provider = LocalProvider(**fields).with_files(mounts=mounts)
                self.interpreters[name] = provider.interpreter(
                    timeout=60,
                    tools={"echo": lambda value: value},
                    prepare=None if prepare is None else Preparation(prepare),
                )
            return await run(self.interpreters[name], request)
        interpreter = self.interpreters.pop(name, None)
        try:
            if interpreter is not None:
                await interpreter.shutdown()
        except Exception:  # noqa: BLE001 - the client reports any error
            return {"broken": traceback.format_exc()}
        return {}

    async def serve(self) -> None:
        """Answer requests until standard input ends, then remove every sandbox."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=1 << 26)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)

        async def reply(request: dict[str, Any]) -> None:
            say(await self.answer(request) | {"id": request["id"]})

        say({"id": 0, "pid": os.getpid()})
        async with asyncio.TaskGroup() as tasks:
            while line := await lines.readline():
                tasks.create_task(reply(json.loads(line)))
        for interpreter in self.interpreters.values():
            await interpreter.shutdown()


def say(answer: dict[str, Any]) -> None:
    """Write one answer for the client."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def warm_up() -> None:
    """Import the modules that load late, while this user can still read every package."""
    async with LocalProvider(isolation="none").interpreter() as interpreter:
        await run(interpreter, {"code": "1 / 0"})
    await asyncio.to_thread(int)


def become(uid: int, python: str, prefix: str) -> None:
    """Turn root into an ordinary user, with a Python that this user can start."""
    asyncio.run(warm_up())
    sys._base_executable = python  # type: ignore[attr-defined]
    sys.base_prefix = sys.base_exec_prefix = prefix
    for function in [*vars(isolation).values(), *vars(bubblewrap).values()]:
        if hasattr(function, "cache_clear"):  # these caches depend on the previous prefix
            function.cache_clear()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # Make this process as readable as one that the user started: other processes of the user may read its memory.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def main() -> None:
    """Change the user if the settings name one, and serve."""
    settings = json.loads(sys.argv[1])
    if settings.get("uid") is not None:
        become(settings["uid"], settings["python"], settings["prefix"])
    isolation.find_landlock_abi = landlock_abi  # type: ignore[assignment]
    asyncio.run(Host().serve())


if __name__ == "__main__":
    main()
