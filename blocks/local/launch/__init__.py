"""How the driver of a local sandbox is started: forked from a zygote, or as a program of its own."""
