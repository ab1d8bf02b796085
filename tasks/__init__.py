"""What Prefect tracks and retries, and the ledger that it writes to."""
