"""The code for one sandbox: the driver inside, the interpreter on the host, results and errors."""
