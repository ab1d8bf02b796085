"""The start of the driver in a Daytona sandbox. One command of a session contains the whole driver."""

import base64
import shlex

import daytona

from ...sandbox.driver_bundle import pack_driver
from ...sandbox.errors import SandboxStartError
from .errors import CALL_SECONDS, get_message, get_status, retry_call
from .setup import open_session

PYTHON = "python3"
# Bytes of a frame, and of an input that takes no more frames. The pipe behind it holds 64 KiB, and more would block the
# daemon's call.
INPUT_LIMIT_BYTES = 32 * 1024
LOST_RACE_STATUS = 75  # exit status of a start command that finds an earlier start

# `mkdir` succeeds only once, so a repeated start does nothing. The host repeats a start whose answer was lost, and
# Daytona's proxy repeats calls too (libs/common-go/pkg/proxy/retry_transport.go). The shell itself writes the file,
# because a program's argument is limited to 128 KiB. `exit` runs in a subshell, because it would end the session.
COMMAND = """if mkdir -m 700 {folder}; then
printf %s {data} > {folder}/start
{enter}{python} -u -c {boot} {folder}/start
else (exit {status}); fi"""

BOOT = """
import sys

sys.path[:] = [path for path in sys.path if path]  # before a module of the working directory is imported
import binascii, os

path = sys.argv.pop()
with open(path, "rb") as file:
    data, first = file.read().split(b"\\n", 1)
os.unlink(path)
data = binascii.a2b_base64(data)
{loader}
found["main"](first=first.decode())
"""


def name_folder(sandbox_id: str) -> str:
    """Return the path of the driver's own folder in a sandbox."""
    return f"/tmp/rlm-batch-{sandbox_id}"


class StartLostError(Exception):
    """An error of a start whose success is unknown."""


async def start_driver(
    remote: daytona.AsyncSandbox, directory: str, seconds: float, has_secrets: bool, frames: list[bytes]
) -> tuple[str, str]:
    """Start the driver in a directory; return its session and command.

    The command contains the first small frames, which saves a call, and they are removed from `frames`. If frames have
    secrets, the channel sends all of them later, because no command may contain a secret.

    A refused start is retried for `seconds`. After a lost answer, look for the start command in its session. If it is
    missing, start again in a new session, because in the old session the new command would wait for the end of the
    first command. Raise SandboxStartError or StartLostError.
    """
    first, driver = b"", pack_driver()
    while frames and not has_secrets and len(first) + len(frames[0]) <= INPUT_LIMIT_BYTES:
        first += frames.pop(0)
    data = base64.b64encode(driver.data).decode() + "\n"
    command = COMMAND.format(
        folder=name_folder(remote.id),
        data=shlex.quote(data) + shlex.quote(first.decode("utf-8")),  # The shell joins adjacent words.
        enter=f"cd {shlex.quote(directory)} && " if directory else "",
        python=PYTHON,
        boot=shlex.quote(BOOT.format(loader=driver.loader)),
        status=LOST_RACE_STATUS,
    )
    request = daytona.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
    process, session = remote.process, ""

    async def start() -> tuple[str, str]:
        """Send the command once. If the answer is lost, look for the command before the error leads to a retry."""
        nonlocal session
        session = session or await open_session(remote, seconds)
        try:
            answer = await process.execute_session_command(session, request, int(CALL_SECONDS))
            return session, answer.cmd_id
        except daytona.DaytonaError as error:
            if get_status(error) in range(400, 500):
                raise  # Daytona refused the command, so it did not start.
            command_id = await find_command(error)
            if command_id is None:
                session = ""  # The next try opens a new session.
                raise
            return session, command_id

    async def find_command(loss: daytona.DaytonaError) -> str | None:
        """Return the id of the command in the session, or None if it did not arrive. Raises StartLostError."""
        try:
            found = await retry_call(lambda: process.get_session(session, CALL_SECONDS), seconds=seconds, remote=remote)
        except daytona.DaytonaError as error:
            raise StartLostError(
                f"the call that starts the driver was lost ({get_message(loss)}), and its session could "
                f"not be checked ({get_message(error)})"
            ) from error
        return found.commands[0].id if found.commands else None

    try:
        return await retry_call(start, seconds=seconds, remote=remote)
    except daytona.DaytonaError as error:
        raise SandboxStartError(f"the driver did not start in sandbox {remote.id}: {get_message(error)}") from error
