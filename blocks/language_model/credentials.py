"""A mask for credentials in texts from a model's provider, such as answers, errors and log lines.

Servers repeat a key that they refuse, and clients repeat what they sent.
"""

import html
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

from pydantic import BaseModel, SecretStr

from ...sandbox.outcomes.text_escape import SecretFilter

LEAST_CHARACTERS = 6  # The shortest credential that is blanked. Shorter strings are common in ordinary text.
LEAST_IN_ANSWERS = 16  # The shortest credential that is blanked in answers. A shorter key may be a word.
# Words in names of variables, options and headers whose values are credentials.
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


class CredentialMask:
    """The credentials of one request: those passed in, those sent, and those of this process's environment."""

    def __init__(self, **given: Any) -> None:
        """Create a mask from named values. A value is a credential if its name says so."""
        self._credentials = set(_find_credentials("", given))

    def add_call(self, call: Mapping[str, Any]) -> None:
        """Add the key, the headers and the address of a request that LiteLLM is about to send."""
        request: Any = call.get("additional_args") or {}
        headers, address = request.get("headers"), str(request.get("api_base") or "")
        values = {"api_key": call.get("api_key"), "sent": headers, "api_base": address}
        self._credentials.update(_find_credentials("", values))

    def add_settings(self, settings: BaseModel) -> None:
        """Add the credentials among a block's fields, and all long values of its field `environment`."""
        for name, value in settings:
            self._credentials.update(_find_credentials(name, value))
        environment: dict[str, SecretStr] = getattr(settings, "environment", {})
        for secret in environment.values():
            value = secret.get_secret_value()
            if len(value) >= LEAST_IN_ANSWERS:
                self._credentials.add(value)

    def build_filter(self) -> Callable[[str], str]:
        """Return a fast form of `hide`, for many texts. It does not learn of credentials that are added later."""
        return SecretFilter(_list_forms(self._credentials | find_environment_credentials()))

    def hide_sent(self, text: str) -> str:
        """Return the text of an answer with the long credentials of this request blanked."""
        return SecretFilter(_list_forms(value for value in self._credentials if len(value) >= LEAST_IN_ANSWERS))(text)

    def hide(self, text: str) -> str:
        """Return the text with all known credentials blanked."""
        return self.build_filter()(text)


@lru_cache(32)
def build_secret_filter(secrets: frozenset[str]) -> SecretFilter | None:
    """Return a filter that blanks these secrets and their lines in a text; None if none is long enough."""
    lines = {line for secret in secrets for line in secret.splitlines()}
    forms = _list_forms(secrets | lines)
    return SecretFilter(forms) if forms else None


def find_environment_credentials() -> set[str]:
    """Return the credentials in the environment: values of variables with credential names, and passwords in URLs."""
    return set(_find_credentials("", os.environ))


def filter_log_record(record: logging.LogRecord) -> bool:
    """Blank the credentials of this process's environment in a log record and its traceback. Use it as a log filter."""
    hide = CredentialMask().build_filter()
    text = record.getMessage()
    masked_text = hide(text)
    if masked_text != text:
        record.msg, record.args = masked_text, ()
    if record.exc_info:
        traceback = record.exc_text or logging.Formatter().formatException(record.exc_info)
        masked_traceback = hide(traceback)
        if masked_traceback != traceback:
            record.exc_info, record.exc_text = None, masked_traceback
    return True


@lru_cache(1000)
def _is_credential_name(name: str) -> bool:
    return CREDENTIAL_WORDS.search(name.lower().replace("_", "-")) is not None


def _find_credentials(name: str, value: Any) -> Iterator[str]:
    """Yield the credentials in a value, which may be a text, a secret, a dict or a list."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, Mapping):
        for inner, item in value.items():  # type: ignore[reportUnknownVariableType]
            yield from _find_credentials(str(inner), item)  # type: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for item in value:  # type: ignore[reportUnknownVariableType]
            yield from _find_credentials(name, item)
    elif isinstance(value, str):
        yield from _find_in_address(value)
        is_path = value.startswith("/") and os.path.exists(value)  # The path of a file with a key is no credential.
        if _is_credential_name(name) and not is_path:
            yield value
            yield value.strip().partition(" ")[2].strip()  # without a header's scheme, such as Bearer


def _find_in_address(text: str) -> Iterator[str]:
    """Yield the password in a URL, and the parts of its query whose names mark credentials."""
    try:
        address = urlsplit(text if "://" in text else "")
        yield from (address.password or "", unquote(address.password or ""))
    except ValueError:
        return
    for part in address.query.split("&"):
        name, _, value = part.partition("=")
        if _is_credential_name(name):
            yield value


def _list_forms(credentials: Iterable[str]) -> list[str]:
    """Return the credentials, also in forms of JSON, URLs, HTML and `repr`. The longest is first.

    A longer one may contain another.
    """
    forms: set[str] = set()
    for value in credentials:
        if len(value.strip()) >= LEAST_CHARACTERS and not HARMLESS.fullmatch(value.strip()):
            escaped, data = json.dumps(value)[1:-1], value.encode("utf-8", "replace")
            forms |= {value, value.strip(), escaped, repr(escaped)[1:-1], html.escape(value)}
            forms |= {quote(data, safe=""), quote(data), quote_plus(data)}
            forms |= {repr(value)[1:-1], ascii(value)[1:-1], repr(data)[2:-1]}
    return sorted(forms, key=len, reverse=True)
