"""The census: what became of each test in each job of a pipeline, and which tests ran in none of them.

`census_file` has the file of one session, `job_merge` compares the files of a pipeline (pure functions), and
`merge_text` describes the result. The hooks that record a session are in `pytest_accel/census_hooks.py`.
"""
