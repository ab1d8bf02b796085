"""What goes to a sandbox: an execution's code, and its variables as JSON."""
