"""The driver: the program that runs inside a sandbox and executes code there.

It is a supervisor, a single-threaded loop that keeps the wire to the host and runs each execution in a child process.
Standard library only, Python 3.9 or newer, the same for every provider. Its modules and those of ``sandbox/wire`` are
sent together, as one program (``sandbox/driver_bundle.py``); no module of the host imports them.

Modules that ``signal``, ``json`` and ``collections`` are made of are taken directly where that saves start-up time:
importing ``enum`` and ``re`` would cost more than everything else that happens before the first answer. What delays no
first answer is imported where it is used.
"""
