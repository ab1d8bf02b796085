"""What happens in one sandbox: the driver inside, the interpreter on the host, results and errors."""
