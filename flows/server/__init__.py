"""Prefect servers that rlm-batch starts: how their processes are launched, and the application that they serve."""
