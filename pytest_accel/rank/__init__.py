"""Code that runs in a rank, and nothing that another process uses.

A rank is a whole pytest session. Harnesses that spawn processes send them only the test's function, which is simpler.
But a test is more than its function: fixtures of all scopes, parameters, conftests, plugins, rewritten assertions and
captured output have to exist in each rank, and a pickled function has none of them. So a rank collects the test's file
itself, and runs setup, call and teardown by pytest's own protocol.

The ranks meet at a port on which the fork server listens before they exist, and each process group has its own keys in
the store behind it. The usual ways fail: a port that is picked and closed may belong to another program when it is
used, a fixed port serves one world at a time, and torchrun's agents would start new interpreters for each test.

A rank judges no other rank. It has no timeout, no verdict and no selection of tests: it may hang or die at any moment,
and then the driver has to know what happened. It ends nothing that the suite may still use, and puts back only settings
of the process; the driver replaces ranks that a test has damaged. Code that runs between tests calls functions that
were imported before, because a test may have replaced any function of the standard library.
"""
