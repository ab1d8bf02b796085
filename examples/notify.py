"""A program that creates the automations of automations.yaml. Their messages are POST requests to the given address.

    python examples/notify.py https://hooks.example.org/rlm-batch

It needs a Prefect server (PREFECT_API_URL). The server keeps and runs the automations after this program has ended.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from prefect.blocks.webhook import Webhook
from pydantic import SecretStr

address = sys.argv[1]
block = Webhook(url=SecretStr(address)).save("rlm-batch", overwrite=True)
text = Path(__file__).with_name("automations.yaml").read_text().replace("WEBHOOK_BLOCK_ID", str(block))
with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    file.write(text)
    file.flush()
    command = [sys.executable, "-m", "prefect", "automation", "create", "--from-file", file.name]
    sys.exit(subprocess.run(command, check=False).returncode)
