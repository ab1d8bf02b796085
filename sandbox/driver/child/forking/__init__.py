"""A process that is forked for executions: what it must have for that, and how it is asked."""
