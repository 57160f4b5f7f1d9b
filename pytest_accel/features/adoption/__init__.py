"""Suites that are used as they are: marks by rules of the ini file, and the tests of torch's harness."""
