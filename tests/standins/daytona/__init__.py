"""A local Daytona: a server on loopback that works with the unmodified SDK, async or sync.

    python tests/standins/daytona

The server prints the environment to export, and serves until interrupted. Each sandbox is a directory and real
processes on this machine. Each process sees that directory as /home/daytona and /tmp, and the requested volumes at
their mounts, in namespaces that the kernel has to provide. This is not isolation: code can read all files of this user
and use the network.

The stand-in follows the daemon's published source and the observed service in these points:

- a sandbox's life with its events, and no removal while its state changes;
- sequential session commands, each read from a file of the daemon, with input through a pipe, and with logs that can be
  followed and replayed from their beginning;
- snapshots of sandboxes;
- unique names, volumes that become ready after a delay, pages of lists, lifetimes, rate limits and quotas;
- errors for Python programs that rename, chmod, append to, lock or randomly write files of a volume.

Previews, archives and image builds are not modelled.

Tests use `process.DaytonaStandin`, which changes `Settings` while the server runs, and reads its state.
"""
