"""Leases on devices and CPU slots: who may use which device, within this session and among all sessions of a machine.

The package exists because two tests that use one device at once fail, or pass, for reasons that neither shows. It
grants devices by a pure policy (`policy`), and excludes other sessions by the kernel's locks on files (`locks`): no
daemon, and nothing that a dead session would leave locked. `leases` has the requests, in the thread of one event loop.

It knows neither worlds nor ranks, and starts no process. It does not decide whether a device is healthy
(:mod:`pytest_accel.hardware.health` does), and never takes a lease away from a running test.
"""
