"""The driver: the program that runs inside a sandbox and executes code there.

It is a supervisor: a single-threaded loop that serves the wire to the host and runs each execution in a child process.
It needs only the standard library of Python 3.9 or newer, and is the same for every provider. Its modules and those of
``sandbox/wire`` are sent together as one program (``sandbox/driver_bundle.py``); no module of the host imports them.

To start fast, the driver imports the C modules behind ``signal``, ``json`` and ``collections`` directly: importing
``enum`` and ``re`` would take longer than everything else before the first answer. Modules that the first answer does
not need are imported where they are used.
"""
