"""The history of a session, while it runs and afterwards.

It gives the record of a session's events (``--accel-record``), a page made of it (``--accel-report``), a summary in CI
systems (``accel_ci``), and the commands ``trace``, ``report``, ``summary`` and ``census`` (which tests ran in no job),
which also join the records of several sessions. While a session runs, it gives the status line, and the
report on a signal.

It uses the moments `configure`, `make_recorders`, `redirected` and `workers_collected`, and the event stream
(`core/record_events.py`). It stands on `order` and `planning` for the remaining time on the status line.

- From events to the file: `record_hooks` and `record_file`. To the present state: `live_hooks` and `live_state`.
- From the file to sessions: `timeline` (pure). From sessions to files: `chrome_trace`, `ci_summary`, and `report_page`
  with `page_plots`, `page_details` and `page_style`. `commands` has the list of these files.
- Census: `census_hooks` records what became of each test, and `census_merge` compares the jobs of a pipeline (pure).

Tests: ``tests/features/record``. Pages: ``docs/reference/record.md``, ``docs/how-to/find-out-what-is-wrong.md`` and
those in ``docs/how-to/ci``.
"""
