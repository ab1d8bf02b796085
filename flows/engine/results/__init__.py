"""Where a flow run has its outcomes: new ones, those from before, and what Prefect keeps of them."""
