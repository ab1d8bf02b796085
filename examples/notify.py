"""A program that creates the automations of automations.yaml. Their messages are POST requests to the given address.

    python examples/notify.py https://hooks.example.org/rlm-batch

It needs a Prefect server (PREFECT_API_URL). The server keeps and runs the automations after this program has ended. The
next start of this program replaces them.
"""

import sys
from pathlib import Path

import yaml
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from pydantic import SecretStr

address = sys.argv[1]
block = Webhook(url=SecretStr(address)).save("rlm-batch", overwrite=True)
text = Path(__file__).with_name("automations.yaml").read_text().replace("WEBHOOK_BLOCK_ID", str(block))
with get_client(sync_client=True) as client:
    for fields in yaml.safe_load(text)["automations"]:
        automation = AutomationCore.model_validate(fields)
        existing = client.read_automations_by_name(automation.name)
        if existing:
            client.update_automation(existing[0].id, automation)
        else:
            client.create_automation(automation)
        print(f"The server has the automation {automation.name!r}")
