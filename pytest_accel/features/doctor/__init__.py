"""The devices of a machine as the plugin sees them, and the problems that tests on accelerators have there.

It gives ``pytest --accel-info``, and the commands ``info`` and ``doctor`` of ``python -m pytest_accel``.

It reads the kernel's inventory, vendors and lock folder, and changes nothing: it
imports no torch, initializes no device runtime and creates no file.

- The doctor: `checks` looks at the machine and judges what it finds, and `commands` shows the findings.
- The devices of a session: `info`.

Tests: ``tests/features/doctor``, and ``tests/hardware/test_nvidia_command.py`` with a simulated driver. Pages:
``docs/reference/command.md``, ``docs/how-to/find-out-what-is-wrong.md``.
"""
