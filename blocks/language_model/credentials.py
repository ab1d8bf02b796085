"""A mask for credentials in texts from a model's provider, such as answers, errors and log lines.

Servers repeat a key that they refuse, and clients repeat what they sent.
"""

import base64
import binascii
import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, SecretStr

HIDDEN = "[...]"  # The replacement of a credential.
LEAST_CHARACTERS = 6  # The shortest credential that is blanked. Shorter strings are common in ordinary text.
LEAST_IN_ANSWERS = 16  # The shortest credential that is blanked in answers. A shorter key may be a word.
# Words in names of variables, options and headers whose values are credentials, in addition to LiteLLM's list.
CREDENTIAL_WORDS = re.compile(
    "(^|-)([a-z]*(apikey|password|secret|token)|keys?|tokens|secrets|passwd|pass|passphrase|pat|auth|authorization|jwt"
    "|credentials?|creds|cookies?|access|private|bearer|dsn|license|signature|webhook|headers)(-|$)|[a-z]-pwd$"
    "|(^|-)(conn(ection)?-?str(ing)?|sshpass|sas|secret-?id|kubeconfig(-data)?)$"
)
# Values under such names that are not credentials: numbers, names of modes, and dummy keys of servers without keys.
HARMLESS = re.compile(
    "[0-9.,:_-]*|true|false|enabled?|disabled?|default|required|optional|bearer|basic|oauth2?|ollama|lm-studio",
    re.IGNORECASE,
)
HEADER_PARTS = re.compile("(?=[^,;= ]*[0-9])[^,;= ]{16,}")  # Secret parts of a signed header.
MAX_CAUSES = 10  # Causes of an error that are inspected.


class CredentialMask:
    """The credentials of one request: those passed in, those sent, and those of this process's environment."""

    def __init__(self, **given: Any) -> None:
        """Create a mask from named values. A value is a credential if its name says so."""
        # The names are checked later, because LiteLLM's list of names needs LiteLLM imported.
        self._values: list[tuple[str, Any]] = list(given.items())

    def add_call(self, call: Mapping[str, Any]) -> None:
        """Add the key, the headers and the address of a request that LiteLLM is about to send."""
        request: Any = call.get("additional_args") or {}
        self._values += [("api_key", call.get("api_key")), ("sent", request.get("headers"))]
        self._values.append(("api_base", str(request.get("api_base") or "")))

    def add_error(self, error: BaseException | None) -> None:
        """Add the headers and the address of the request in an error or its causes."""
        for _ in range(MAX_CAUSES):
            if error is None:
                return
            for holder in (error, getattr(error, "response", None)):
                try:
                    request: Any = getattr(holder, "request", None)
                    self._values += [("sent", dict(request.headers)), ("url", str(request.url))]
                except Exception:  # noqa: BLE001 - LiteLLM has a hundred clients; skip other objects
                    continue
            error = error.__cause__ or error.__context__

    def add_settings(self, settings: BaseModel) -> None:
        """Add the credentials among a block's fields. A long value of `environment` counts as one under any name."""
        for name, value in settings:
            self._values.append((name, _reveal(value)))
        environment: Mapping[str, Any] = _reveal(getattr(settings, "environment", {}))
        self._values += [("secret", value) for value in environment.values() if len(value) >= LEAST_IN_ANSWERS]

    def build_filter(self) -> Callable[[str], str]:
        """Return a fast `hide`, which knows the credentials of this moment."""
        forms = _list_forms(self._find_sent() | find_environment_credentials())
        return lambda text: _replace(text, forms)

    def hide_sent(self, text: str) -> str:
        """Return the text of an answer with the credentials of this request blanked."""
        return _blank(text, (found for found in self._find_sent() if len(found) >= LEAST_IN_ANSWERS))

    def hide(self, text: str) -> str:
        """Return the text with all known credentials blanked."""
        return _blank(text, self._find_sent() | find_environment_credentials())

    def _find_sent(self) -> set[str]:
        return {found for name, value in self._values for found in _find_credentials(name, value)}


def find_environment_credentials() -> set[str]:
    """Return the credentials in the environment: values of variables with credential names, and passwords in URLs."""
    return {value for name in os.environ for value in _find_credentials(name, os.environ[name])}


def hide_environment_credentials(text: str) -> str:
    """Return the text with the credentials of this process's environment blanked."""
    return _blank(text, find_environment_credentials())


def filter_log_record(record: logging.LogRecord) -> bool:
    """Blank the credentials of this process's environment in a log record and its traceback; used as a log filter."""
    text = record.getMessage()
    if (shown := hide_environment_credentials(text)) != text:
        record.msg, record.args = shown, ()
    if record.exc_info:
        trace = record.exc_text or logging.Formatter().formatException(record.exc_info)
        if (shown := hide_environment_credentials(trace)) != trace:
            record.exc_info, record.exc_text = None, shown
    return True


def _reveal(value: Any) -> Any:
    """Return a field's value with its secrets as plain text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {name: _reveal(item) for name, item in value.items()}  # type: ignore[reportUnknownVariableType]
    return value


@lru_cache(1000)
def _is_credential_name(name: str) -> bool:
    try:
        from litellm.litellm_core_utils.sensitive_data_masker import SensitiveDataMasker
    except ImportError:  # LiteLLM has another version, or is missing.
        is_listed = False
    else:
        is_listed = SensitiveDataMasker().is_sensitive_key(name)
    return is_listed or CREDENTIAL_WORDS.search(name.lower().replace("_", "-")) is not None


def _find_credentials(name: str, value: Any) -> Iterator[str]:
    """Yield the credentials in a value, which may be text, JSON in a text, a dict or a list."""
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
        for part in value.split(";") if ";" in value else ():  # A connection string, such as AccountKey=...
            yield part.partition("=")[2].strip()
        scheme, _, rest = value.strip().partition(" ")  # A header's scheme, such as Bearer or Basic.
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
    """Yield the password in a URL, and the parts of its query whose names mark credentials."""
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
    """Blank these credentials in the text, also in their JSON and URL forms.

    The longest form is replaced first, because it may contain another one.
    """
    return _replace(text, _list_forms(credentials))


def _list_forms(credentials: Iterable[str]) -> list[str]:
    forms: set[str] = set()
    for value in credentials:
        if len(value.strip()) >= LEAST_CHARACTERS and not HARMLESS.fullmatch(value.strip()):
            escaped = json.dumps(value)[1:-1]
            forms |= {value, value.strip(), quote(value, safe=""), escaped, repr(escaped)[1:-1], repr(value)[1:-1]}
    return sorted(forms, key=len, reverse=True)


def _replace(text: str, forms: list[str]) -> str:
    for form in forms:
        text = text.replace(form, HIDDEN)
    return text
