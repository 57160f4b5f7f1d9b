"""``pytest --accel-info``, and the commands ``info`` and ``doctor`` of ``python -m pytest_accel``.

They read the kernel's inventory, vendors and lock folder, and change nothing: they import no torch, initialize no
device runtime and create no file. Pages: ``docs/reference/command.md``, ``docs/how-to/find-out-what-is-wrong.md``.
"""
