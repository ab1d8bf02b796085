"""The tasks that Prefect tracks and retries, and the ledger of their results."""
