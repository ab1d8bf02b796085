"""Readable one-line messages for failed requests to a Prefect server."""

from ..sandbox.outcomes.server_message import extract_message


def describe_server_error(error: Exception) -> str:
    """Return the status and the server's message without its JSON, or the client's error if there was no response."""
    response = getattr(error, "response", None)
    if response is None:
        return str(error).partition("\n")[0] or type(error).__name__
    status, words = f"{response.status_code} {response.reason_phrase}", extract_message(response.text)
    return f"{status}: {' '.join(words.split())[:1000]}" if words else status
