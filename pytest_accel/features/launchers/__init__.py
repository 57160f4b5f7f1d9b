"""Sessions whose processes a launcher has started, on this machine and on others, and worlds that are MPI jobs.

Rank 0 of the launcher is the driver, and its fork server starts all ranks of its machine. The other processes are no
ranks: a rank that dies or hangs is replaced as without a launcher, and the launcher sees no process exit. On each other
machine one of them is an agent with a fork server; the others wait for the end. A fork server in each launched process
was rejected: each would import torch, and one machine would be as hard as several. SPMD, in which each launched process
runs the whole session, was rejected, too: one dead rank would end all of it, and each rank would report. SPMD remains
the default, for suites that are written for it.

How a session starts, if ``accel_launcher`` is on: `core/launcher_env.py` reads the launcher's variables.
`launched_session.enter` decides whether the processes can be one session. On one machine they meet at a Unix socket of
rank 0, and wait (`rendezvous`). On several, pyzmq connects them to rank 0, with keys that follow
from a secret (`machine_link`). Each process writes what it waits for to the log of ``--accel-log``. After
a timeout, an error names the missing ranks.

For the pool, several machines have one starter (`machines_starter`), which has one fork server for each machine
(`server_group`), the locks of this machine, and those of other machines through their agents (`agent_client`, `agent`).
`mpi` has another starter.

The conversations are of frozen structs (`messages/struct_messages.py`): `agent_messages`.
"""
