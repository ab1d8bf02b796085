"""Credentials in texts that come back from a model's provider: found by where they are kept, and blanked.

Servers repeat the key that they refuse, and clients what they have sent.
"""

import base64
import binascii
import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "[...]"  # in a text, where a credential stood
LEAST_CHARACTERS = 6  # of a credential: what is shorter stands in texts for other reasons,
LEAST_IN_ANSWERS = 16  # and in an answer, which is not to be changed for a key that is a word
# Words of names of variables, options and headers that have a credential, beside LiteLLM's own list of them.
CREDENTIAL_WORDS = re.compile(
    "(^|-)([a-z]*(apikey|password|secret|token)|keys?|tokens|secrets|passwd|pass|passphrase|pat|auth|authorization|jwt"
    "|credentials?|creds|cookies?|access|private|bearer|dsn|license|signature|webhook|headers)(-|$)|[a-z]-pwd$"
    "|(^|-)(conn(ection)?-?str(ing)?|sshpass|sas|secret-?id|kubeconfig(-data)?)$"
)
# What stands there although it is none: numbers, names of modes, and what a server that asks for no key is given.
HARMLESS = re.compile(
    "[0-9.,:_-]*|true|false|enabled?|disabled?|default|required|optional|bearer|basic|oauth2?|ollama|lm-studio",
    re.IGNORECASE,
)
HEADER_PARTS = re.compile("(?=[^,;= ]*[0-9])[^,;= ]{16,}")  # of a signed header, each of which tells something
MAX_CAUSES = 10  # of an error that are looked at


class CredentialMask:
    """The credentials of one request: what it was given, what was sent, and those of this process's environment."""

    def __init__(self, **given: Any) -> None:
        """`given` are values by the names that they are known by: what those say to be a credential is one."""
        self._values: list[tuple[str, Any]] = list(given.items())  # LiteLLM's list is not there before it is imported

    def add_call(self, call: Mapping[str, Any]) -> None:
        """Takes in what a client of LiteLLM's is about to send: the key, the headers and the address."""
        request: Any = call.get("additional_args") or {}
        self._values += [("api_key", call.get("api_key")), ("sent", request.get("headers"))]
        self._values.append(("api_base", str(request.get("api_base") or "")))

    def add_error(self, error: BaseException | None) -> None:
        """Takes in the headers and the address of the request that an error, or what led to it, has."""
        for _ in range(MAX_CAUSES):
            if error is None:
                return
            for holder in (error, getattr(error, "response", None)):
                try:
                    request: Any = getattr(holder, "request", None)
                    self._values += [("sent", dict(request.headers)), ("url", str(request.url))]
                except Exception:  # noqa: BLE001 - of a hundred clients; what is no request says nothing
                    continue
            error = error.__cause__ or error.__context__

    def hide_sent(self, text: str) -> str:
        """The text of an answer without the keys that were given and sent."""
        return _blank(text, (found for found in self._find_sent() if len(found) >= LEAST_IN_ANSWERS))

    def hide(self, text: str) -> str:
        """The text without any credential that is known."""
        return _blank(text, self._find_sent() | find_environment_credentials())

    def _find_sent(self) -> set[str]:
        return {found for name, value in self._values for found in _find_credentials(name, value)}


def find_environment_credentials() -> set[str]:
    """The values of this process's environment that are credentials by their names, and passwords in addresses."""
    return {value for name in os.environ for value in _find_credentials(name, os.environ[name])}


def hide_environment_credentials(text: str) -> str:
    """The text without credentials of this process's environment."""
    return _blank(text, find_environment_credentials())


def filter_log_record(record: logging.LogRecord) -> bool:
    """A log filter: a line has no credential of this process's environment, and neither has its traceback."""
    text = record.getMessage()
    if (shown := hide_environment_credentials(text)) != text:
        record.msg, record.args = shown, ()
    if record.exc_info:
        trace = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.exc_info, record.exc_text = None, hide_environment_credentials(trace)
    return True


def _is_credential_name(name: str) -> bool:
    try:
        from litellm.litellm_core_utils.sensitive_data_masker import SensitiveDataMasker
    except ImportError:  # another version, or none
        is_listed = False
    else:
        is_listed = SensitiveDataMasker().is_sensitive_key(name)
    return is_listed or CREDENTIAL_WORDS.search(name.lower().replace("_", "-")) is not None


def _find_credentials(name: str, value: Any) -> Iterator[str]:
    """The credentials in a value, which may be text, JSON in a text, a dict or a list."""
    if isinstance(value, Mapping):
        for inner, item in value.items():  # type: ignore[reportUnknownVariableType]
            yield from _find_credentials(str(inner), item)  # type: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for item in value:  # type: ignore[reportUnknownVariableType]
            yield from _find_credentials(name, item)
    elif isinstance(value, bytes):
        yield from _find_credentials(name, value.decode("latin-1"))
    elif isinstance(value, str) and value:
        yield from _find_in_address(value)
        if not _is_credential_name(name):
            return
        if value.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                yield from _find_credentials(name, json.loads(value))
        if not (value.startswith("/") and os.path.exists(value)):
            yield value
        for part in value.split(";") if ";" in value else ():  # of a connection string, such as AccountKey=...
            yield part.partition("=")[2].strip()
        scheme, _, rest = value.strip().partition(" ")  # as a header has it: Bearer, Basic
        if rest:
            yield rest.strip()
            yield from HEADER_PARTS.findall(rest)
            if scheme.lower() == "basic":
                yield from _find_in_basic(rest.strip())


def _find_in_basic(text: str) -> Iterator[str]:
    try:
        pair = base64.b64decode(text, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return
    yield pair
    yield pair.partition(":")[2]


def _find_in_address(text: str) -> Iterator[str]:
    """The password in an address, and the parts of its query that are credentials by their names."""
    if "://" not in text:
        return
    try:
        address = urlsplit(text)
        password = address.password
    except ValueError:
        return
    if password:
        yield password
        yield unquote(password)
    for part in address.query.split("&"):
        name, _, value = part.partition("=")
        if value and _is_credential_name(name):
            yield value


def _blank(text: str, credentials: Iterable[str]) -> str:
    """The text without them, also as JSON and addresses write them; the longest first, for one may hold another."""
    forms: set[str] = set()
    for value in credentials:
        if len(value.strip()) >= LEAST_CHARACTERS and not HARMLESS.fullmatch(value.strip()):
            forms |= {value, value.strip(), quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text
