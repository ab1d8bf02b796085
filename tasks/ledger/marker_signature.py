"""Signatures of completion markers, by a key that no code in a sandbox can read.

Code can write to the volume that the markers are on. A marker that the host has written carries an HMAC-SHA256 over its
whole text, where it stands and on which volume, as a last field: none can be made up, changed, or put in another's
place. The key is that of the environment variable `RLM_BATCH_MARKER_KEY`, which several machines can share, or else a
file of this user's, made when it is first needed.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...blocks.provider import SandboxProvider
from ...blocks.storage.data_dirs import get_data_dir
from ...sandbox.errors import ConfigurationError

KEY_VARIABLE = "RLM_BATCH_MARKER_KEY"
MIN_KEY_CHARACTERS = 32  # which `openssl rand -hex 32` has twice: nobody guesses it from a marker
SIGNATURE_CHARACTERS = 64
BEFORE_SIGNATURE = ',"hmac":"'


@dataclass(frozen=True, slots=True)
class MarkerSigner:
    """Signs the markers on one volume, and says which of them it has signed."""

    provider: str
    volume: str | None
    _key: bytes = field(repr=False)

    @classmethod
    def for_volume_of(cls, provider: SandboxProvider) -> Self:
        """The signer for the provider's volume. Raises ConfigurationError where no key can be had."""
        return cls(provider.provider_name, provider.volume_name, load_marker_key())

    def sign(self, path: str, text: str) -> str:
        """The text, a JSON object that is not empty, with its signature. `path` is the marker's on the volume."""
        return f'{text[:-1]}{BEFORE_SIGNATURE}{self._compute(path, text)}"}}'

    def is_signed(self, path: str, text: str) -> bool:
        """Whether the text is what `sign` has made for that path, to the letter."""
        before, separator, after = text.rpartition(BEFORE_SIGNATURE)
        signature, end = after[:SIGNATURE_CHARACTERS], after[SIGNATURE_CHARACTERS:]
        if not separator or end != '"}':
            return False
        return hmac.compare_digest(signature.encode(), self._compute(path, before + "}").encode())

    def _compute(self, path: str, text: str) -> str:
        place = json.dumps(["completion marker", self.provider, self.volume, path])
        return hmac.new(self._key, f"{place}\n{text}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def load_marker_key() -> bytes:
    """The key of the environment, or else of this user's file, which is made where there is none.

    Raises ConfigurationError where the key is too short, the file cannot be made, or others can read it.
    """
    text = os.environ.get(KEY_VARIABLE, "").strip()
    if text:
        if len(text) < MIN_KEY_CHARACTERS:
            raise ConfigurationError(
                f"{KEY_VARIABLE} has {len(text)} characters, and needs {MIN_KEY_CHARACTERS}: `openssl rand -hex 32` "
                "makes one"
            )
        return os.fsencode(text)
    path = get_data_dir() / "marker.key"
    try:
        try:
            return _read_key_file(path)
        except FileNotFoundError:
            _create_key_file(path)
            return _read_key_file(path)
    except OSError as error:
        raise ConfigurationError(
            f"the key that signs completion markers, {path}, can be neither read nor made ({error.strerror}): see to "
            f"that, or set {KEY_VARIABLE} to a key of {MIN_KEY_CHARACTERS} characters or more"
        ) from error


def _read_key_file(path: Path) -> bytes:
    """The key in the file. Raises OSError, and ConfigurationError for a file that cannot be trusted."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(4096).strip()
    remedy = "delete it, and markers that were signed with it count no more"
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"the key that signs completion markers, {path}, is not this user's alone (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}): if nobody else has read it, chown and chmod 600 it; otherwise {remedy}"
        )
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigurationError(f"the key that signs completion markers, {path}, is damaged: {remedy}")
    return key


def _create_key_file(path: Path) -> None:
    """Makes the file with a new key, whole from its first moment; one that another process has made stays.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(fd)
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        os.unlink(partial)
