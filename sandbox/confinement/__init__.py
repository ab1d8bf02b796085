"""What local sandboxes hold code to: Landlock rules, and a filter of system calls."""
