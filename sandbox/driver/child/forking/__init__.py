"""A process that is forked for executions: the conditions for a fork, and the service that forks."""
