"""The zygote, which runs on this machine only: its modules are not sent to other machines."""
