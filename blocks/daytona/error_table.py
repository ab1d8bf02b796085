"""The meaning of Daytona's refusals: one row for each known refusal, with its source.

The status alone is not enough. Daytona answers 400, 401 and 404 also when a machine is missing, when a sandbox has just
started, and when its own services cannot reach each other. So a refusal counts as an error of the block only if a row
says so. Unknown refusals by the API count as transient, and unknown refusals by a sandbox's daemon as final. No row
says that a refusal by the API is transient, such as that of a busy machine or of a name that a lost call has taken.

A source is the name of a file of github.com/daytonaio/daytona at release 0.190 (the last with published code), an issue
of that repository (#NUMBER), or a measurement of the service.
"""

import re
from dataclasses import dataclass
from enum import Enum


class Meaning(Enum):
    """The consequence of a refusal."""

    PASSING = "the same call may succeed in a moment, so it is retried"
    MAYBE_GONE = "like PASSING, unless the sandbox's record says that the sandbox is not running"
    GONE = "the sandbox, or a session or command in it, has ended"
    THROTTLED = "too many calls: the call is retried after the time that the response names"
    QUOTA = "other sandboxes use the quota: wait until some of them have ended"
    KEY = "the key was refused: a key that is refused again some seconds later is wrong"
    FINAL = "every attempt will be refused: the request has to change"


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of refusal: its statuses (empty for any), a pattern in its message (case-insensitive), and its meaning.

    `advice` says what to change, if that is certain.
    """

    statuses: tuple[int, ...]
    pattern: str
    meaning: Meaning
    source: str
    advice: str = ""

    def matches(self, status: int | None, message: str) -> bool:
        """Return True if a refusal is of this kind."""
        is_status = not self.statuses or status in self.statuses
        return is_status and re.search(self.pattern, message, re.IGNORECASE) is not None


SNAPSHOT_ADVICE = "set snapshot to one of the account's"
REGION_ADVICE = "set target to another"
KEY_ADVICE = "set DAYTONA_API_KEY, or api_key of the block, to a valid key"
RIGHTS_ADVICE = "use a key with that right"

# The first matching row counts.
TABLE: tuple[Row, ...] = (
    Row((429,), "", Meaning.THROTTLED, "authenticated-rate-limit.guard.ts"),
    # Refusals by the proxy or by the runner. The proxy queries the API. The runner is the machine of the sandbox.
    Row((400,), "failed to get (runner info|sandbox public status)", Meaning.MAYBE_GONE, "get_sandbox_target.go"),
    Row(
        (401,),
        "authentication failed: |Bearer token (validation error|is invalid)",
        Meaning.MAYBE_GONE,  # The proxy also refuses a valid key if the API did not respond.
        "auth.go, #5136",
    ),
    Row((400,), r"Is the Sandbox started\?|no IP address found", Meaning.MAYBE_GONE, "proxy.go"),
    Row((404,), "sandbox container not found", Meaning.MAYBE_GONE, "proxy.go"),
    Row((400,), "Sandbox is not running", Meaning.MAYBE_GONE, "toolbox.deprecated.service.ts"),
    Row((400, 404), "Sandbox with ID( or name)? .+ not found", Meaning.GONE, "sandbox.service.ts"),
    Row((400, 404, 409), r"Sandbox \S+ is not started", Meaning.GONE, "measured: one that was stopped"),
    Row((404,), "(session|command) not found", Meaning.GONE, "command.go"),
    Row((410,), "", Meaning.GONE, "input.go"),
    # Files in a sandbox
    Row(
        (400, 403, 404),
        "no such file|file not found|permission denied|is a directory|not a directory|path must be a file",
        Meaning.FINAL,
        "apps/daemon/pkg/toolbox/fs",
    ),
    # Snapshots
    Row((400, 404), r"Snapshot \S+ not found", Meaning.FINAL, "sandbox.service.ts", SNAPSHOT_ADVICE),
    Row((400,), r"Snapshot \S+ is not available in region", Meaning.FINAL, "sandbox.service.ts", SNAPSHOT_ADVICE),
    Row(
        (400,),
        r"Snapshot \S+ is (inactive|error|build_failed|removing)\b",
        Meaning.FINAL,
        "sandbox.service.ts, snapshot-state.enum.ts",
        f"activate it in Daytona's dashboard, or {SNAPSHOT_ADVICE}",
    ),
    # Volumes
    Row((400,), "Volume quota exceeded", Meaning.FINAL, "volume.service.ts", "delete volumes in Daytona's dashboard"),
    # Limits of the account
    Row(
        (400,),
        "exceeds maximum allowed per",
        Meaning.FINAL,
        "sandbox.service.ts",
        "lower cpu, memory or disk, or use another snapshot",
    ),
    Row((400, 402, 403), r"\b(limit|quota)s? (has been |is )?(exceeded|reached)", Meaning.QUOTA, "sandbox.service.ts"),
    Row((403,), "is suspended", Meaning.FINAL, "organization.service.ts", "see Daytona's dashboard"),
    Row((403,), r"Region \S+ is not available", Meaning.FINAL, "sandbox.service.ts", REGION_ADVICE),
    Row((404,), "Region not found", Meaning.FINAL, "sandbox.service.ts", REGION_ADVICE),
    # Settings of the block
    Row(
        (400,),
        "Invalid (IP address|network format|CIDR prefix|domain)|allow list cannot contain",
        Meaning.FINAL,
        "network-validation.util.ts",
        "change network_allow_list or domain_allow_list",
    ),
    Row((400,), "Invalid mount path", Meaning.FINAL, "volume-mount-path-validation.util.ts", "set volume_mount_path"),
    Row((400,), r"\b\w+ must (not )?be ", Meaning.FINAL, "main.ts: the framework's check of each field"),
    # The key. A temporary refusal of a valid key looks the same as the refusal of a wrong key.
    Row((401,), "", Meaning.KEY, "global-auth.guard.ts, #5136", KEY_ADVICE),
    Row((403,), "Forbidden resource", Meaning.KEY, "the framework's text for every guard of the API", RIGHTS_ADVICE),
)
