"""The inside of a forked child: what runs the code, and what the code finds."""
