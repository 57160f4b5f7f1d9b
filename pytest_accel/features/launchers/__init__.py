"""Sessions whose processes a launcher has started, on this machine and on others, and worlds that are MPI jobs.

Rank 0 of the launcher is the driver. Every other process runs an agent, which starts a fork server and is no rank: a
rank that dies or hangs is replaced as without a launcher, and the launcher sees no process exit. SPMD, in which each
launched process runs the whole session, was rejected: one dead rank would end all of it, and each rank would report.
SPMD remains the default, for suites that are written for it.

How a session starts, if ``accel_launcher`` is on: `core/launcher_env.py` reads the launcher's variables.
`launched_session.enter` decides whether the processes can be one session. They meet at a Unix socket of rank 0
(`rendezvous`), to which pyzmq connects processes of other machines, with keys that follow from a secret
(`machine_link`, `job_secret`). Each process writes what it waits for to the log of ``--accel-log``. After a timeout, an
error names the missing ranks.

For the pool, `machines_starter` is one starter, which has one fork server for each launched process (`server_group`),
the locks of this machine, and those of other machines through their agents (`agent_client`, `agent`). `mpi` has
another starter.

The conversations are of frozen structs (`messages/struct_messages.py`): `agent_messages`, and the one between the
processes of an MPI job and the controller (`mpi`).
"""
