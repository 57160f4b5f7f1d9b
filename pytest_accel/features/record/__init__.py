"""The history of a session, while it runs and afterwards.

It gives the record of a session's events (``--accel-record``), a page made of it (``--accel-report``), a summary for
GitHub, and the commands ``trace``, ``report``, ``summary`` and ``census`` (which tests ran in no job),
which also join the records of several sessions. While a session runs, it gives the report on a signal (`live_hooks`).

It receives the events of the pool (`core/record_events.py`).

From hooks to the file: `record_hooks` and `record_file`. From the file to sessions: `timeline` (pure). From sessions to
text: `chrome_trace`, `session_summary` and `census`.

Tests: ``tests/features/record``. Pages: ``docs/reference/record.md``, ``docs/how-to/find-out-what-is-wrong.md`` and
those in ``docs/how-to/ci``.
"""
