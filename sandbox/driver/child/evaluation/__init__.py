"""How the text of code is compiled and run: the value of its last expression, and what it awaits."""
