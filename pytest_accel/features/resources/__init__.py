"""Named resources: licenses, ports, memory and CPU cores that tests need besides devices, or in place of them.

A project names them in its ini file (``accel_resources = license: 2, port-9000: 1``). This adds the mark ``needs``,
with which a test leases some of them and stays in its process, and the fixture `accel_resources`, which says which
ones. A project without the setting may have a mark and a fixture of these names of its own.

To the kernel, a named resource is a kind of device (`hardware/vendors/named.py`) with the usual leases, locks and
queue: ``devices(1, kind="license")`` needs nothing of this feature. It leaves `DriverLeases` on items, and gets each
lease through the pool client.

Tests: ``tests/features/resources``. Page: ``docs/how-to/xdist.md``.
"""
