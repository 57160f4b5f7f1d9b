"""The record of a session's events (``--accel-record``), and what is made from it.

`record_file` has the file, `timeline` puts the events of one or several sessions together (pure functions).
"""
