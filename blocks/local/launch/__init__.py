"""The start of a local sandbox's driver: forked from a zygote, or spawned as a separate program."""
