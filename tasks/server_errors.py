"""What became of a request to a Prefect server, in a line for people."""

from ..sandbox.outcomes.server_message import extract_message


def describe_server_error(error: Exception) -> str:
    """The status and the server's own words, without the JSON around them; of no answer what the client says."""
    response = getattr(error, "response", None)
    if response is None:
        return str(error).partition("\n")[0] or type(error).__name__
    status, words = f"{response.status_code} {response.reason_phrase}", extract_message(response.text)
    return f"{status}: {' '.join(words.split())[:1000]}" if words else status
