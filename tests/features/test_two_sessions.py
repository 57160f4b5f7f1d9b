"""Tests of two sessions that run at the same time and use the same devices of one machine."""

from __future__ import annotations

from tests.background_suite import BackgroundSuite, suite

__all__ = ["suite"]


def test_a_session_gets_devices_that_are_idle_in_another(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_suite.py",
        """
        import pytest
        from tests.inner import note, wait_for


        @pytest.mark.devices(4)
        def test_all():
            pass


        def test_idle():
            note("idle", "here")
            wait_for("go on")


        @pytest.mark.devices(4)
        def test_all_again():
            pass
        """,
    )
    first = suite.start("--accel=sim:4,shared")
    suite.read("idle")
    # An idle world of the first session holds all devices.
    second = suite.run("--accel=sim:4,shared", "-k", "test_all and not again", "--accel-wait=20")
    second.expect({"test_all": "PASSED"})
    assert first.process.poll() is None
    suite.write("go on", "")
    first.finish().expect(dict.fromkeys(("test_all", "test_idle", "test_all_again"), "PASSED"))
