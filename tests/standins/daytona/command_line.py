"""The command line of the Daytona stand-in."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
from typing import Any

from . import __doc__ as description
from .server import serve
from .settings import Settings


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="by default one that is free")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    for item in dataclasses.fields(Settings):
        text = item.type == "str"
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=str if text else json.loads, metavar=str(item.type)
        )
    arguments = vars(parser.parse_args())
    port, until_eof = arguments.pop("port"), arguments.pop("until_eof")
    options: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    # A text is plain, or JSON if `Running` passes it.
    options = {name: json.loads(v) if isinstance(v, str) and v.startswith('"') else v for name, v in options.items()}
    settings = Settings(**options)

    def announce(base: str) -> None:
        print(f"export DAYTONA_API_KEY={settings.key}\nexport DAYTONA_API_URL={base}/api", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, port, until_eof, announce))
