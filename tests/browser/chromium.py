"""A headless Chromium, driven over the Chrome DevTools Protocol (CDP).

It needs only Debian's chromium and `websockets`, which the tests already use. Selenium would add a driver, a downloader
of drivers and fifteen packages; Playwright would add a Node runtime of 120 MB. Neither would do more for these tests.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import ClientConnection, connect

from ..infra.bound_process import start_bound_process
from ..infra.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # Chromium's sandbox does not start for root, and the pages are the tests' own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # Resolve and fetch only this machine's addresses.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)
PATIENCE = 90.0  # seconds for a page to show an expected text on a busy machine

# JavaScript that finds the smallest element with a visible text; those in a dialog come before the page behind it.
FIND = """
((selector, text) => {
  const seen = e => e.getClientRects().length > 0;
  const said = e => (e.innerText || e.value || e.getAttribute('aria-label') || '').trim();
  const all = [...document.querySelectorAll(selector)].filter(seen);
  const exact = all.filter(e => said(e) === text);
  const found = exact.length ? exact : all.filter(e => said(e).includes(text));
  return found.sort((a, b) => said(a).length - said(b).length)[0];
})
"""
# JavaScript that fills a field. Frameworks notice a change only through the field's native setter and an event.
FILL = """
((e, value) => {
  const kind = e.tagName === 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
  Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(e, value);
  e.dispatchEvent(new Event('input', {bubbles: true}));
  e.dispatchEvent(new Event('change', {bubbles: true}));
})
"""


def installed() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one page, as a context manager.

    `asked` has the addresses that it requested, `errors` its exceptions, and `refused` the answers with a status of 400
    or more and the requests that failed.
    """

    def __init__(self, width: int = 1280, height: int = 900, flags: Sequence[str] = ()) -> None:
        self._size = width, height
        self._flags = flags
        # Chromium aborts if the path of its socket, which is below TMPDIR, has more than 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="browser-of-rlm-batch-", dir="/tmp")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: ClientConnection | None = None
        self._numbers = itertools.count(1)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.refused: list[str] = []

    def __enter__(self) -> Self:
        program = installed()
        assert program is not None, "there is no chromium"
        size = f"--window-size={self._size[0]},{self._size[1]}"
        self._process = start_bound_process(
            [program, *FLAGS, *self._flags, size, f"--user-data-dir={self._folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": self._folder},
        )
        try:
            page = wait_until(self._find_page, "chromium", timeout=PATIENCE)
            assert page is not None
            self._socket = connect(page, max_size=None, proxy=None, ping_interval=None)
            for domain in ("Page", "Network", "Runtime"):
                self.command(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _find_page(self) -> str | None:
        """Return the address of the page's protocol, once the browser has one. Raise AssertionError if it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"chromium ended with status {self._process.returncode}"
        with suppress(OSError, ValueError, IndexError, httpx.HTTPError):
            port = int((Path(self._folder) / "DevToolsActivePort").read_text().splitlines()[0])
            pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=60).json()
            return next((page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"), None)

    def _end(self) -> None:
        if self._socket is not None:
            with suppress(Exception):
                self.command("Browser.close")
            self._socket.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

        def is_removed() -> bool:
            """Remove the folder; retried, because killed child processes may still write to it."""
            shutil.rmtree(self._folder, ignore_errors=True)
            return not os.path.exists(self._folder)

        wait_until(is_removed, self._folder)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result; raise AssertionError if the browser refuses it."""
        assert self._socket is not None
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            heard = json.loads(self._socket.recv(timeout=PATIENCE))
            if heard.get("id") == number:
                assert "error" not in heard, f"{method}: {heard['error']}"
                return heard["result"]
            if heard.get("method") == "Network.requestWillBeSent":
                self.asked.append(heard["params"]["request"]["url"])
            elif heard.get("method") == "Network.responseReceived":
                answer = heard["params"]["response"]
                if answer["status"] >= 400:
                    self.refused.append(f"{answer['status']} {answer['url']}")
            elif heard.get("method") == "Network.loadingFailed":
                self.refused.append(heard["params"]["errorText"])
            elif heard.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(heard["params"])[:500])

    def goto(self, url: str) -> None:
        """Open an address."""
        self.command("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        evaluation = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in evaluation, f"{expression}: {evaluation['exceptionDetails']}"
        return evaluation["result"].get("value")

    def until(self, what: Callable[[], Any], said: str) -> Any:
        """Wait until a condition holds and return its value; raise AssertionError with the page's text if it fails."""
        try:
            return wait_until(what, said, timeout=PATIENCE)
        except TimeoutError as error:
            shown = f"{error}; the page shows:\n{self.text()[:3000]}"
            raise AssertionError(f"{shown}\nrefused: {self.refused}\nexceptions: {self.errors}") from None

    def text(self) -> str:
        """Return the visible text of the page."""
        return self.js("document.body ? document.body.innerText : ''") or ""

    def see(self, *texts: str) -> None:
        """Wait until the page shows all of these texts."""
        for text in texts:
            self.until(lambda text=text: text in self.text(), repr(text))

    def click(self, text: str, selector: str = "button, a, label, [role=button], [role=menuitem], [role=tab]") -> None:
        """Click the element with that text with the mouse, and retry until the element has received the click.

        A page that is still loading can move the element, and a click then misses it.
        """
        where = json.dumps(selector), json.dumps(text)

        def try_to_click() -> bool:
            spot = self.js(
                f"(() => {{ const e = {FIND}({where[0]}, {where[1]}); if (!e || e.disabled) return null;"
                "window.hasHadClick = false;"
                "e.addEventListener('click', () => { window.hasHadClick = true; }, {once: true, capture: true});"
                "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
                "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
            )
            if spot is None:
                return False
            for kind in ("mousePressed", "mouseReleased"):
                self.command("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)
            return bool(self.js("window.hasHadClick !== false"))  # a click that loads another page deletes the mark

        self.until(try_to_click, f"something to click on that says {text!r}")

    def fill(self, label: str, value: str) -> None:
        """Replace the text of the field below that label."""
        self.until(
            lambda: self.js(
                f"(() => {{ const l = {FIND}('label, h3', {json.dumps(label)}); if (!l) return false;"
                "const around = l.tagName === 'H3' ? l.parentElement : l.closest('.p-label') || l;"
                "const e = around.querySelector('input, textarea'); if (!e) return false;"
                f"{FILL}(e, {json.dumps(value)}); return true; }})()"
            ),
            f"a field with the label {label!r}",
        )

    def edit(self, label: str, text: str) -> None:
        """Replace the text in the JSON editor below the label that begins with that text, with the keyboard.

        Retry until the editor has the text: while a page is loading, the editor can miss the key that selects all.
        """
        find = (
            f"const l = [...document.querySelectorAll('label')].find(e => e.innerText.trim().startsWith("
            f"{json.dumps(label)})); let p = l; while (p && !p.querySelector('fieldset')) p = p.parentElement;"
            "const e = p && p.querySelector('fieldset').querySelector('textarea, [contenteditable]');"
        )

        def try_to_edit() -> bool:
            if not self.js(f"(() => {{ {find} if (e) e.focus(); return !!e; }})()"):
                return False
            self.command("Input.dispatchKeyEvent", type="keyDown", key="a", code="KeyA", commands=["selectAll"])
            self.command("Input.insertText", text=text)
            shown = self.js(f"(() => {{ {find} return e ? e.value ?? e.innerText : ''; }})()")
            return str(shown).split() == text.split()

        self.until(try_to_edit, f"an editor with the label {label!r} and the text {text}")

    def screenshot(self, path: Path) -> Path:
        """Write the page as PNG."""
        width, height = self._size
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        time.sleep(0.5)  # let the page be drawn in the new size
        data = self.command("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        return path
