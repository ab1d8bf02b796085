"""What an execution came to, out of what its sandbox says of it: a result or an error, and text made safe to show."""
