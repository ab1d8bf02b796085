"""Error messages for refusals by a Prefect server."""

from typing import Any

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from rlm_batch.sandbox.outcomes.server_message import describe_server_error, extract_message

INVALID = {
    "exception_message": "Invalid request received.",
    "exception_detail": [{"loc": ["body", "limit"], "msg": "Field required", "type": "missing", "input": {"a": 1}}],
    "request_body": {"a": 1},
}


def make_refusal(status: int, **content: Any) -> PrefectHTTPStatusError:
    """Return the error that Prefect's client raises for this answer."""
    response = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1:4200/api/variables/"), **content)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    return PrefectHTTPStatusError.from_httpx_error(caught.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (make_refusal(409, json={"detail": "It is there."}), "409 Conflict: It is there."),
        (
            make_refusal(422, json=INVALID),
            "422 Unprocessable Entity: Invalid request received.: body.limit: Field required",
        ),
        (
            make_refusal(502, html="<html><title>502 Bad Gateway</title><body>x</body>"),
            "502 Bad Gateway: 502 Bad Gateway",
        ),
        (make_refusal(503), "503 Service Unavailable"),
        (httpx.ConnectError("All connection attempts failed"), "All connection attempts failed"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
    ],
    ids=str,
)
def test_a_server_error_shows_its_message_without_json(error: Exception, text: str) -> None:
    assert describe_server_error(error) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('no runner: {"message": "try later"}, said the API', "no runner: try later, said the API"),
        ('{"message": "{\\"error\\": \\"inner\\"}"}', "inner"),
        ('{"detail": [{"loc": [], "msg": "one"}, {"msg": "two"}]}', "one; two"),
        ("{" * 5000, "{" * 5000),
    ],
)
def test_the_message_is_extracted_from_json_within_text(text: str, words: str) -> None:
    assert extract_message(text) == words
