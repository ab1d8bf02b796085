"""Makes the automations of automations.yaml, whose messages go to the address that is given: any that takes a POST.

    python examples/notify.py https://hooks.example.org/rlm-batch

It needs a server (PREFECT_API_URL): automations are the server's, and outlive this program.
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
