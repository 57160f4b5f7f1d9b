"""Suites that are used as they are, without changes to their files.

It gives marks by rules of the ini file (``accel_rules``), and runs the tests of torch's ``MultiProcessTestCase`` in the
plugin's ranks (``accel_adopt = torch``). Driver and ranks collect the files independently, so both adopt the tests.

- `marker_rules` reads rules (pure), `suite_adoption` adds the marks, `torch_harness` replaces methods of the harness.

Tests: ``tests/features/adoption``. Page: ``docs/how-to/adopt-a-suite.md``.
"""
