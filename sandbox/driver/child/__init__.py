"""The inside of a forked child: the code's runner, and the functions and modules that code finds."""
