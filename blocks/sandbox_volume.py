"""A volume that is accessed through a sandbox, for providers whose API cannot access a volume's files."""

import base64
import json
from collections.abc import Callable

from ..sandbox.interpreter import Interpreter
from ..sandbox.requests.execution_request import encode_variable
from .storage.safe_paths import split_path
from .volume import VolumeFile, VolumeStore

TIMEOUT_SECONDS = 600.0  # seconds for a list, or one file
LISTED = "listed.json"  # a file in the working folder: a list may be longer than SUBMIT allows

LIST = """
import json, os, stat
found = [(name, os.lstat(os.path.join(VOLUME, name))) for name in list_volume(path)]
with open(listed, "w") as file:
    json.dump([[name, entry.st_size] for name, entry in found if stat.S_ISREG(entry.st_mode)], file)
"""
CHECK = """
import os
load_from_volume(path) if not os.path.isfile(os.path.join(VOLUME, path)) else None
SUBMIT(place=os.path.join(VOLUME, path))
"""
PUT = """
import base64
save_to_volume(path, base64.b64decode(data))
"""
DELETE = """
import os, shutil
list_volume(path)
place = os.path.join(VOLUME, path)
try:
    shutil.rmtree(place) if os.path.isdir(place) and not os.path.islink(place) else os.remove(place)
except OSError as error:
    raise VolumeError(f"{path!r} could not be deleted: {error.strerror or error}") from None
"""


class SandboxVolume(VolumeStore):
    """A volume behind a sandbox. The first access opens the sandbox, and `close` deletes it."""

    def __init__(self, make_interpreter: Callable[..., Interpreter]) -> None:
        self._make_interpreter = make_interpreter  # The function takes `timeout`, seconds for each execution.
        self._interpreter: Interpreter | None = None

    async def ls(self, path: str = "") -> list[VolumeFile]:
        interpreter = await self._open()
        await interpreter.execute(LIST, {"path": "/".join(split_path(path, may_be_empty=True)), "listed": LISTED})
        listed = json.loads(await interpreter.sandbox.download(LISTED))
        return [VolumeFile(str(name), int(size)) for name, size in listed]

    async def get(self, path: str) -> bytes:
        interpreter = await self._open()
        result = await interpreter.execute(CHECK, {"path": "/".join(split_path(path))})
        return await interpreter.sandbox.download(result["place"])

    async def put(self, path: str, data: bytes) -> None:
        interpreter = await self._open()
        encoded = {"data": encode_variable(base64.b64encode(data).decode())}
        await interpreter.execute(PUT, {"path": "/".join(split_path(path))}, encoded=encoded)

    async def delete(self, path: str) -> None:
        interpreter = await self._open()
        await interpreter.execute(DELETE, {"path": "/".join(split_path(path))})

    async def close(self) -> None:
        """Delete the sandbox."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.shutdown()

    async def _open(self) -> Interpreter:
        if self._interpreter is None or not self._interpreter.is_alive:
            await self.close()
            interpreter = self._make_interpreter(timeout=TIMEOUT_SECONDS)
            await interpreter.start()
            self._interpreter = interpreter
        return self._interpreter
