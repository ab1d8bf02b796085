"""A local Daytona: a server on loopback that the unmodified SDK, async or sync, takes for the real one.

    python tests/standins/daytona [--port 0] [--boot-s 0.09] ...

prints the environment to export, and serves until it is interrupted. Each sandbox is a directory and real processes on
this machine. Each process sees that directory as /home/daytona and /tmp, and a mounted volume where it was asked for.
Where the kernel gives no namespaces, code runs in the directory itself (its home), names below /tmp are replaced in
what the client says by names of the sandbox's own, and volumes are refused. It is not isolation: code can read what
this user can read, and use the network.

What it does as the real one does (the daemon's published source, and what was seen of the service): the life of a
sandbox with its events, no removal while its state changes, session commands one after the other, each read from a file
of the daemon's, with logs that are followed and replayed from their beginning, input through a pipe, names that are
taken once, volumes that are not ready at once, list pages, lifetimes, rate limits and quotas. Files of a volume refuse
what the real ones refuse (rename, chmod, append, random writes, locks) to Python
programs. What it does not: snapshots, PTYs, previews, archives, builds of images.

`Settings` are what can be asked of it, at its start or while it runs (`POST /standin`); `GET /standin` says what it has
and how often each call came. `running.Running` is the same for tests.
"""
