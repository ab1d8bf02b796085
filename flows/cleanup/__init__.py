"""Orphaned sandboxes, and the Prefect server's identity by which they are recognised."""
