"""A stand-in for Modal on loopback: its control plane and its command router, for the unmodified client.

By hand, ``python tests/standins/modal`` prints the environment to export and serves until Ctrl-C. Tests start it
with ``--pipe``: it then takes a JSON request per line on standard input (see `Standin.ask`), answers on standard
output, and ends with that input.

It is built on the protocol classes of the installed client. Modelled: sandboxes of both backends with a root directory
of their own, where real processes run; commands with binary streams, replayable by offset; lifetimes and idle
timeouts; volumes that a sandbox sees as they were when it was created, with what it wrote visible to others from the
commit on (``sync MOUNT`` inside, or the sandbox's end); images that are built once, whose ``pip install`` is real and
whose other commands are not run; tags, names, lists, tokens, idempotency keys; throttling and quotas. A command has a
process namespace of its own, which Modal's does not have.

Where the kernel gives no namespaces there are no root directories: commands run in the machine's own file system, and a
sandbox that asks for a volume is refused. Set the block's ``workdir`` to a directory that may be made.
"""
