"""The confinement of local sandboxes: Landlock rules and a system call filter."""
