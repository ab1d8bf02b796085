"""Everything that a person, or the parent of a sharded job, runs as a Prefect flow."""
