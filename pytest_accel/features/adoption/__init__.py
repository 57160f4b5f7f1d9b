"""Suites that are used as they are: marks by rules of the ini file, and tests of torch's harness in ranks.

Driver and ranks collect the files independently, so both adopt the tests. Page: ``docs/how-to/adopt-a-suite.md``.
"""
