"""A server on this machine that speaks OpenAI's chat API, with scripted answers, delays and faults.

    python tests/standins/openai_chat.py --port 8123 --delay 0.2 --script FILE

It prints its base URL (`http://127.0.0.1:PORT/v1`). In tests it runs in a thread: `with ChatServer() as server`. Each
word is one token, so tests can check the counts that a client reports. It needs only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

GATE_SECONDS = 60.0  # seconds that a reply waits for other requests at most


@dataclass(frozen=True)
class Reply:
    """The answer to a prompt, sent after `delay` seconds.

    With a `gate`, the delay begins when that many requests have been active at the same time, or after a minute.

    A `status` other than 200 is an API error with `text` as its message. `drop` closes the connection without an
    answer. `body` is sent in the place of an answer. `no_usage` omits the token counts, and `usage` replaces them.
    `no_text` sends an answer without text, but counts the tokens of `text`. `logprobs` adds a log probability for each
    word. `trickle` sends a body that never ends. `finish_reason` says why the answer ended, `refusal` is a text in the
    place of the answer, and `reasoning` has thoughts apart from it.
    """

    text: str = ""
    delay: float | None = None
    gate: int = 0
    status: int = 200
    retry_after: float | None = None
    drop: bool = False
    body: bytes = b""
    no_usage: bool = False
    usage: tuple[int, int] | None = None
    no_text: bool = False
    logprobs: bool = False
    trickle: bool = False
    finish_reason: str | None = "stop"
    refusal: str | None = None
    reasoning: str = ""


@dataclass
class Stats:
    """Counts of a server: `answered` is the number of `requests` that got an answer, with these tokens."""

    requests: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    at_once: int = 0
    most_at_once: int = 0
    longest_prompt: int = 0  # characters of all messages of one request


@dataclass(frozen=True)
class Request:
    """A received request: the model, the messages' texts, the headers (names in lower case), the body, and the time."""

    model: str
    messages: list[str]
    headers: dict[str, str]
    body: dict[str, Any] = field(repr=False)
    at: float = 0.0  # monotonic seconds

    @property
    def text(self) -> str:
        """Return the texts of all messages, one per line."""
        return "\n".join(self.messages)


Script = Callable[[Request], Reply | str | None]


def content(message: dict[str, Any]) -> str:
    """Return a message's text; a list of parts is joined."""
    text = message.get("content") or ""
    return text if isinstance(text, str) else "".join(part.get("text", "") for part in text)


class ChatServer:
    """A server that answers `/v1/chat/completions` on 127.0.0.1.

    The server asks `script` first. Then it tries `rules`, pairs of a text and its replies; the first pair whose text is
    in the messages counts. Its replies are sent in turn, and the last one repeats. For other requests it sends
    "answer to: " and the last message. `delay` is in seconds and applies to replies without their own.
    """

    def __init__(self, *, script: Script | None = None, delay: float = 0.0, port: int = 0) -> None:
        self.script = script
        self.rules: list[tuple[str, list[Reply]]] = []
        self.delay = delay
        self.port = port
        self.stats = Stats()
        self.requests: list[Request] = []
        self.keep = True  # keep the received requests in `requests`
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Return the base URL for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def rule(self, text: str, *replies: Reply | str) -> None:
        """Answer requests that contain the text with these replies, one after the other."""
        self.rules.append((text, [Reply(reply) if isinstance(reply, str) else reply for reply in replies]))

    async def serve(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", self.port, limit=2**26, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat-server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.serve(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return False if the connection has to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        data = await reader.readexactly(int(headers.get("content-length") or 0))
        path = head[0].split(" ")[1]
        if not path.endswith("/chat/completions"):
            self._send(writer, 404, _error(f"there is no {path} here"))
            return True
        body = json.loads(data)
        stats = self.stats
        stats.requests += 1
        stats.at_once += 1
        stats.most_at_once = max(stats.most_at_once, stats.at_once)
        try:
            return await self._answer(body, headers, reader, writer)
        finally:
            stats.at_once -= 1

    async def _answer(
        self, body: dict[str, Any], headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        texts = [content(message) for message in body["messages"]]
        request = Request(body["model"], texts, headers, body, time.monotonic())
        if self.keep:
            self.requests.append(request)
        stats = self.stats
        stats.longest_prompt = max(stats.longest_prompt, sum(map(len, texts)))
        reply = self._reply(request)
        until = request.at + GATE_SECONDS
        while stats.most_at_once < reply.gate and time.monotonic() < until:  # noqa: ASYNC110 - the count covers all connections
            await asyncio.sleep(0.01)
        delay = self.delay if reply.delay is None else reply.delay
        if delay:
            await asyncio.sleep(delay)
        if reply.drop or reader.at_eof():
            return False
        if reply.body:
            self._send(writer, 200, reply.body)
            return True
        if reply.trickle:
            writer.write(b"HTTP/1.1 200 Scripted\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
        if reply.status != 200:
            self._send(writer, reply.status, _error(reply.text or f"status {reply.status}"), reply.retry_after)
            return True
        prompt, completion = reply.usage or (sum(len(text.split()) for text in texts), len(reply.text.split()))
        stats.answered += 1
        stats.prompt_tokens += prompt
        stats.completion_tokens += completion
        message = {"role": "assistant", "content": None if reply.no_text else reply.text, "refusal": reply.refusal}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{stats.requests}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
        }
        if reply.logprobs:
            words = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in reply.text.split()]
            answer["choices"][0]["logprobs"] = {"content": words}
        if not reply.no_usage:
            answer["usage"] = {
                "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            }  # fmt: skip
        self._send(writer, 200, json.dumps(answer).encode())
        await writer.drain()
        return True

    def _reply(self, request: Request) -> Reply:
        reply = self.script(request) if self.script is not None else None
        if reply is None:
            for text, replies in self.rules:
                if text in request.text:
                    reply = replies.pop(0) if len(replies) > 1 else replies[0]
                    break
            else:
                reply = "answer to: " + request.messages[-1]
        return Reply(reply) if isinstance(reply, str) else reply

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, body: bytes, retry_after: float | None = None) -> None:
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if retry_after is not None:
            head += f"Retry-After: {retry_after:g}\r\n"
        writer.write(head.encode() + b"\r\n" + body)


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "scripted", "code": None}}).encode()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="by default one that is free")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--script", help="a JSON file: a list of [text, answer, answer, ...]")
    options = parser.parse_args()
    server = ChatServer(delay=options.delay, port=options.port)
    server.keep = False
    if options.script:
        with open(options.script, encoding="utf-8") as file:
            for text, *answers in json.load(file):
                server.rule(text, *answers)

    async def run() -> None:
        await server.serve()
        print(server.url, flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
