"""The two servers of the Modal stand-in."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import tempfile
from pathlib import Path

from grpclib.server import Server
from modal_proto import api_pb2

from modal._utils.grpc_utils import custom_detail_codec

from ..process import answer_requests, die_with_parent, say_hello
from .command_router import CommandRouter
from .control_plane import ControlPlane
from .standin import Standin

Result = api_pb2.GenericResult


async def serve(pipe: bool) -> None:
    """Serve until standard input ends (with `pipe`) or until SIGINT or SIGTERM."""
    if pipe:
        die_with_parent()
    root = Path(tempfile.mkdtemp(prefix="standin-modal-"))
    (root / "sandboxes").mkdir()
    standin = Standin(root)
    servers = [
        Server([kind(standin)], status_details_codec=custom_detail_codec) for kind in (ControlPlane, CommandRouter)
    ]
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    commits = await asyncio.start_unix_server(standin.on_sync, root / "commits")
    try:
        addresses: list[str] = []
        for server in servers:
            # The socket names its protocol, because only then does asyncio set TCP_NODELAY.
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listening.bind(("127.0.0.1", 0))
            await server.start(sock=listening)
            addresses.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
        standin.router_url = addresses[1]
        say_hello(
            {
                "url": addresses[0], "token_id": standin.token_id, "token_secret": standin.token_secret,
                "root": str(root),
            },
            is_piped=pipe, MODAL_SERVER_URL=addresses[0],
            MODAL_TOKEN_ID=standin.token_id, MODAL_TOKEN_SECRET=standin.token_secret,
        )  # fmt: skip
        requests = asyncio.create_task(answer_requests(standin, stop.set)) if pipe else None
        await stop.wait()
        if requests is not None:
            requests.cancel()
    finally:
        commits.close()
        for server in servers:
            server.close()
        for box in list(standin.boxes.values()):
            await standin.end(box, Result.GENERIC_STATUS_TERMINATED)
        shutil.rmtree(root, ignore_errors=True)
