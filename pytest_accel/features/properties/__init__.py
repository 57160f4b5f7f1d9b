"""Property-based tests on several ranks: Hypothesis runs the same examples on all ranks, in lock-step.

It gives ``@given`` and state machines in distributed tests, without an option. Without it, each rank would draw other
examples, and a collective in the test would hang or compare different data.

It uses the moment `around_call`, in a rank whose suite has imported Hypothesis, and `rank/exchange.py` for messages.

- `lockstep` takes each step of an example together with the other ranks. `example_steps` has these messages, and the
  conclusions that all ranks reach from them.
- `hypothesis_engine` is the only module that replaces internals of Hypothesis.

Tests: ``tests/features/properties``. Page: ``docs/how-to/test-properties.md``.
"""
