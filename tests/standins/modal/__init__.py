"""A stand-in for Modal on loopback: its control plane and its command router, for the unmodified client.

From a shell, ``python tests/standins/modal`` prints the environment to export and serves until Ctrl-C. Tests start it
with ``--pipe``: it then takes a JSON request per line on standard input (see `Standin.ask`), answers on standard
output, and ends with that input.

The stand-in uses the protocol classes of the installed client. It models:

- sandboxes, each with its own root directory, where real processes run, but not the backend for GPUs;
- commands with binary streams that can be replayed from any offset;
- lifetimes and idle timeouts;
- volumes, which a sandbox sees as they were at its creation. Other sandboxes see what it wrote after its commit
  (``sync MOUNT`` in the sandbox, or the sandbox's end);
- images that are built once: their ``pip install`` is real, and their other commands are not run;
- tags, names, lists, tokens, idempotency keys, throttling and quotas.

Unlike Modal, each command has its own process namespace.
"""
