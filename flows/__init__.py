"""The Prefect flows, which a person or the parent of a sharded job runs."""
