"""The fork server: the process from which all ranks on this machine are forked, and the pool's client of it.

A rank needs torch, pytest and the installed plugins. A new interpreter imports them in seconds, and each rank of each
world would: that is why suites spawn few processes and share them. A fork of a process that has imported them takes
milliseconds, so a test that asks for new processes, or follows a test that has damaged its world, costs little.

Ranks are not forked from the driver or the controller. These have threads, may have initialised a device runtime, and
have imported the suite: a fork would inherit locks that no thread releases, a runtime that does not survive a fork, and
modules that have seen another environment. `multiprocessing` has a fork server, but only one in a process, which
belongs to the code under test; it does not report how a child has ended, and forks one process for each request.

The fork server refuses

- to import what the suite imports, except for the modules that ``accel_preload`` names: what a file sets before an
  import must have its effect in ranks;
- to fork once it has threads or a device runtime: it reports the module, or starts again without plugins;
- to run code of tests, to lease devices, and to decide which world ends: it starts and kills ranks as the pool says,
  and reports how each has ended;
- to outlive the controller, or to leave anything behind: it is the subreaper of all processes that its ranks start.

`server` is the program, `server_process` starts it, and `client` is the pool's side. `server_messages` has the messages
that they exchange.
"""
