"""The page that asks for a shared server's password, before any page of Prefect's UI.

Prefect's UI asks for a password on its first page, but shows an error in place of a flow run's page. It keeps the
password in the browser's local storage, and so does this page. The address that `rlm-batch server` prints has the
password behind `#`, which browsers do not send.
"""

from http.cookies import CookieError, SimpleCookie
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

COOKIE = "rlm-batch-signed-in"
POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; frame-ancestors 'none'"
PAGE = """<!doctype html>
<title>rlm-batch</title>
<form>
  <p>The command <code>rlm-batch server</code> shows the password of this server.</p>
  <label>Password <input type="password" autofocus></label> <button>Sign in</button>
  <p role="status"></p>
</form>
<script>
  async function signIn(text) {
    const password = btoa(text);
    const answer = await fetch("/api/admin/version", {headers: {Authorization: "Basic " + password}});
    if (!answer.ok) {
      document.querySelector("[role=status]").textContent = "That is not the password of this server.";
      return;
    }
    localStorage.setItem("prefect-password", password);
    document.cookie = "NAME=VALUE; path=/; samesite=strict";
    location.replace(location.pathname + location.search);
  }
  document.querySelector("form").addEventListener("submit", event => {
    event.preventDefault();
    signIn(document.querySelector("input").value.trim());
  });
  if (location.hash.length > 1) signIn(location.hash.slice(1));
</script>
"""


class SignInMiddleware:
    """Answer a browser with the sign-in page until it has signed in to this server. The API checks the password."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._value = token_hex(8)  # Servers that get the same port later have another value.
        self._page = PAGE.replace("NAME", COOKIE).replace("VALUE", self._value)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection to the application, or answer with the page."""
        if scope["type"] != "http" or scope["path"].startswith("/api") or self._has_signed_in(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
            await HTMLResponse(self._page, headers=headers)(scope, receive, send)

    def _has_signed_in(self, headers: Headers) -> bool:
        """Return whether a request has the cookie, or is for something other than a page, such as a script."""
        if "text/html" not in headers.get("accept", ""):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and cookie.value == self._value
