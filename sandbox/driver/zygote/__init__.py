"""The zygote, on this machine alone: nothing of it is sent elsewhere."""
