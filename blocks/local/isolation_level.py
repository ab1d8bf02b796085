"""The choice of a local sandbox's isolation level: the requested one, or the strongest that works here."""

import os
import shutil
import sys
from typing import Literal

from ...sandbox.confinement import policy as confinement_policy
from ...sandbox.errors import ConfigurationError, RlmBatchError, SandboxStartError
from ...sandbox.interpreter import Interpreter
from ..worker_consent import check_no_isolation
from . import isolation
from .creation import create_sandbox
from .deletion import remove_folder
from .handle import LocalSandboxHandle
from .inventory import pick_folder
from .isolation import IsolationLevel
from .launch.driver_process import SHORTAGE_HINT, is_shortage
from .settings import LocalSettings

PROBE = """
try:
    open({secret!r}).read()
    seen = True
except OSError:
    seen = False
SUBMIT(seen=seen)
"""
INSTALL_HINT = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
NONE_HINT = "To run the code without any isolation, use the provider local:none"
NAMESPACE_HINT = (
    "If namespaces are forbidden here, allow them: on Ubuntu 24.04 load the AppArmor profile for bwrap (sudo apt "
    "install apparmor-profiles; sudo apparmor_parser -r /usr/share/apparmor/extra-profiles/bwrap-userns-restrict); "
    "elsewhere sudo sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1, and start a container "
    "with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)
_reasons: dict[IsolationLevel, str] = {}  # the reason why a tested level fails here; empty if it works


async def resolve_level(isolation: IsolationLevel | Literal["auto"]) -> IsolationLevel:
    """Return the isolation level for `isolation`; "auto" gives the first of bubblewrap and landlock that works here.

    Raises ConfigurationError with the remedy if no level works. Raises SandboxStartError if a lack of descriptors,
    memory or processes prevents a test.
    """
    if isolation == "none":
        check_no_isolation()
        return isolation
    if isolation != "auto":
        reason = await probe_level(isolation)
        if reason:
            raise ConfigurationError(f"isolation {isolation!r} does not work on this machine: {reason}. {NONE_HINT}")
        return isolation
    reasons: list[str] = []
    for level in ("bubblewrap", "landlock"):
        reason = await probe_level(level)
        if not reason:
            return level
        reasons.append(f"{level}: {reason}")
    raise ConfigurationError(
        f"this machine cannot isolate local sandboxes ({'; '.join(reasons)}): use the provider container, which needs "
        f"Podman or Docker. {NONE_HINT}"
    )


async def probe_level(level: IsolationLevel) -> str:
    """Return why a level does not work here; empty if it works. Each process runs code on the level only once."""
    if level not in _reasons:
        if sys.platform != "linux":
            reason = f"local isolation needs Linux (or WSL2), and this is {sys.platform}"
        elif confinement_policy.find_architecture() is None:
            reason = f"isolation needs x86_64 or aarch64, and this machine is {os.uname().machine}"
        elif level == "bubblewrap" and shutil.which("bwrap") is None:
            reason = f"bwrap is not on the PATH: {INSTALL_HINT}"
        elif level == "landlock" and not isolation.find_landlock_abi():
            reason = "this kernel has no Landlock: use Linux 5.13 or newer, and do not switch it off (lsm=)"
        else:
            reason = await try_level(level)
            if reason:  # The sandbox may have been killed, for example for lack of memory.
                reason = await try_level(level)
        _reasons[level] = reason
    return _reasons[level]


async def try_level(level: IsolationLevel) -> str:
    """Run code that tries to read a file outside its sandbox. Return why the level fails; empty if it works.

    Raises SandboxStartError for a temporary shortage, which a weaker level would not remedy.
    """
    # The folder has a sandbox's name, so that `reap` finds it if this process is killed.
    folder = pick_folder()
    secret = folder / "secret"
    try:
        folder.mkdir()
        folder.chmod(0o755)
        secret.touch()
        secret.chmod(0o644)
    except OSError as error:
        remove_folder(folder)
        raise ConfigurationError(f"no sandbox can be created: {error}. Set TMPDIR to another directory") from error

    async def open_sandbox() -> LocalSandboxHandle:
        return create_sandbox(LocalSettings(isolation=level), level, {"managed-by": "rlm-batch"})

    interpreter = Interpreter(open_sandbox, timeout=20.0)
    try:
        result = await interpreter.execute(PROBE.format(secret=str(secret)))
        return "code in it could read a file outside" if result["seen"] else ""
    except RlmBatchError as error:
        if is_shortage(error):
            hint = "" if "ulimit" in error.summary else f". {SHORTAGE_HINT}"
            raise SandboxStartError(f"isolation {level!r} could not be tested: {error.summary}{hint}") from error
        last_line = str(error).strip().splitlines()[-1]  # A Python that cannot start prints a traceback.
        reason = f"its first sandbox failed: {last_line}"
        return f"{reason}. {NAMESPACE_HINT}" if level == "bubblewrap" else reason
    finally:
        await interpreter.shutdown()
        secret.unlink()
        folder.rmdir()
