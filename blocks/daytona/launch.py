"""The start of the driver in a Daytona sandbox. One command of a session contains the whole driver."""

import base64
import shlex

import daytona

from ...sandbox.driver_bundle import pack_driver
from ...sandbox.errors import SandboxStartError
from .errors import CALL_SECONDS, get_message, get_status, retry_call
from .setup import open_session

PYTHON = "python3"
# Bytes of a small frame. An input with more takes no further frames: the daemon writes it to a pipe of 64 KiB, and
# would block if the pipe is full.
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
    """Start the driver in a directory, and return the ids of its session and command.

    The command contains the first small frames, which saves a call, and they are removed from `frames`. If frames have
    secrets, the channel sends all of them later, because no command may contain a secret.

    A refused start is retried for `seconds`. Raise SandboxStartError or StartLostError.
    """
    first_frames = b""
    while frames and not has_secrets and len(first_frames) + len(frames[0]) <= INPUT_LIMIT_BYTES:
        first_frames += frames.pop(0)
    command = _build_command(remote.id, directory, first_frames)
    request = daytona.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)

    async def start() -> tuple[str, str]:
        # Each try has a new session: the command would wait in a session where the command of a lost try runs.
        session = await open_session(remote, seconds)
        try:
            answer = await remote.process.execute_session_command(session, request, int(CALL_SECONDS))
            return session, answer.cmd_id
        except daytona.DaytonaError as error:
            if get_status(error) in range(400, 500):
                raise  # Daytona refused the command, so it did not start.
            command_id = await _find_command(remote, session, seconds, error)
            if command_id is None:
                raise
            return session, command_id

    try:
        return await retry_call(start, seconds=seconds, remote=remote)
    except daytona.DaytonaError as error:
        raise SandboxStartError(f"the driver did not start in sandbox {remote.id}: {get_message(error)}") from error


def _build_command(sandbox_id: str, directory: str, first_frames: bytes) -> str:
    driver = pack_driver()
    data = base64.b64encode(driver.data).decode() + "\n"
    return COMMAND.format(
        folder=name_folder(sandbox_id),
        data=shlex.quote(data) + shlex.quote(first_frames.decode("utf-8")),  # The shell joins adjacent words.
        enter=f"cd {shlex.quote(directory)} && " if directory else "",
        python=PYTHON,
        boot=shlex.quote(BOOT.format(loader=driver.loader)),
        status=LOST_RACE_STATUS,
    )


async def _find_command(
    remote: daytona.AsyncSandbox, session: str, seconds: float, loss: daytona.DaytonaError
) -> str | None:
    """Return the id of the session's command; None if it did not arrive. Raise StartLostError if that is unknown."""
    try:
        answer = await retry_call(
            lambda: remote.process.get_session(session, CALL_SECONDS), seconds=seconds, remote=remote
        )
    except daytona.DaytonaError as error:
        raise StartLostError(
            f"the call that starts the driver was lost ({get_message(loss)}), and its session could not be checked "
            f"({get_message(error)})"
        ) from error
    return answer.commands[0].id if answer.commands else None
