"""The pool: the only owner of a session's worlds, and the conversation between it and the drivers.

The package exists because drivers share devices and warm worlds: each xdist worker is a driver, and only one process
can decide who gets what. That is the controller, in which the pool lives, in one thread with one event loop. Leases and
processes come from a `Starter` (`starter`): that of this machine, or of a feature.

It does not know what a test is, does not talk to ranks that run a test, and judges no outcome.
"""
