"""Tests of test functions that damage the state of their process: they are reported, and the next test can run."""

from __future__ import annotations

import os

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES


@pytest.mark.long
def test_misbehaving_tests_do_not_affect_the_next_test(suite: BackgroundSuite) -> None:
    suite.write(
        "test_rude.py",
        """
        import os
        import signal
        import sys

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.distributed(2)


        @pytest.fixture(autouse=True)
        def meets_the_others(world_size):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == world_size


        def test_writes_what_is_no_text_and_fails(rank):
            os.write(1, b"before \\xff after")
            assert rank == 1, "caf\\xe9 \\udcff"


        def test_closes_standard_streams():
            for number in range(3):
                os.close(number)


        def test_closes_sys_streams():
            sys.stdout.close()
            sys.stderr.close()
            print("still heard")


        def test_after_closed_streams(capfd):
            os.write(1, b"heard")
            assert capfd.readouterr().out == "heard"


        def test_closes_every_descriptor(rank):
            if rank == 1:
                os.closerange(3, 256)


        def test_child_comes_back(rank):
            if rank == 0:
                child = os.fork()
                if child:
                    os.waitpid(child, 0)


        def test_child_comes_back_failing(rank):
            if rank == 0:
                child = os.fork()
                if child == 0:
                    assert 1 + 1 == 3
                os.waitpid(child, 0)


        def test_daemon_stays(rank):
            read, write = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                    os.write(write, b"here")
                    os.closerange(0, 256)
                    while True:
                        signal.pause()
                os._exit(0)
            assert os.read(read, 4) == b"here"
            os.wait()
        """,
    )
    suite.write(
        "test_rude_too.py",
        """
        import pytest
        import torch.distributed as dist


        @pytest.mark.distributed(2)
        def test_another_file(rank, tmp_path):
            dist.barrier()


        @pytest.mark.devices
        def test_is_alone(devices):
            assert len(devices) == 1
        """,
    )
    run = suite.run(CAUSES)
    run.expect(
        {
            "test_writes_what_is_no_text_and_fails": "FAILED failed: AssertionError; rank 0",
            "test_closes_standard_streams": "PASSED",
            "test_closes_sys_streams": "PASSED",
            "test_after_closed_streams": "PASSED",
            "test_closes_every_descriptor": "FAILED",
            "test_child_comes_back": "FAILED failed: forked copy; rank 0",
            "test_child_comes_back_failing": "FAILED failed: forked copy; rank 0",
            "test_daemon_stays": "PASSED ERROR leaked: process; ranks 0-1",
            "test_another_file": "PASSED",
            "test_is_alone": "PASSED",
        }
    )
    assert "errors outside of any test" not in run.text
    # Whichever meets a closed descriptor first: gloo aborts or segfaults, Python ends with status 1.
    assert run.causes["test_closes_every_descriptor"].startswith("died: ")
    shown = {
        "test_child_comes_back": "a process that it had forked has returned from the test",
        "test_child_comes_back_failing": "assert (1 + 1) == 3",
        "test_writes_what_is_no_text_and_fails": "before \N{REPLACEMENT CHARACTER} after",
    }
    for test, text in shown.items():
        assert text in run.failure(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_a_rank_that_gives_up_rights_leaks_them_and_a_forked_driver_ends_nothing(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        @pytest.mark.distributed(2, init=False)
        def test_user(rank):
            if rank == 1:
                os.setuid(65534)


        @pytest.mark.distributed(2, init=False)
        def test_after_user():
            assert os.getuid() == 0


        @pytest.mark.distributed(2, init=False)
        def test_groups():
            os.setgroups([*os.getgroups(), 1234])
            os.setgid(65534)


        @pytest.mark.distributed(2, init=False)
        def test_after_groups():
            assert os.getgid() == 0
            assert 1234 not in os.getgroups()


        @pytest.mark.distributed(2, init=False)
        def test_root(tmp_path):
            os.chroot(tmp_path)


        @pytest.mark.distributed(2, init=False)
        def test_after_root(tmp_path):
            assert os.path.exists("/tmp")


        def test_forked_copy_of_the_driver():
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


        @pytest.mark.distributed(2, init=False)
        def test_after_the_copy():
            pass
        """,
    )
    run = suite.run(CAUSES)
    healthy = ["test_after_user", "test_after_groups", "test_after_root"]
    healthy += ["test_forked_copy_of_the_driver", "test_after_the_copy"]
    leaking = {"test_user": "rank 1", "test_groups": "ranks 0-1", "test_root": "ranks 0-1"}
    run.expect(
        {
            **dict.fromkeys(healthy, "PASSED"),
            **{test: f"PASSED ERROR leaked: setting; {ranks}" for test, ranks in leaking.items()},
        }
    )
    assert "errors outside of any test" not in run.text
    assert "rank 1 left the user (real and effective id) changed from 0 and 0 to 65534 and 65534" in run.text


def test_a_conftest_may_replace_functions_and_the_class_of_threads_when_it_is_imported(suite: BackgroundSuite) -> None:
    """The modules that run marked tests are imported before conftests."""
    suite.write(
        "conftest.py",
        """
        import pickle
        import queue
        import selectors
        import signal
        import threading


        class Forbidden(threading.Thread):
            def start(self):
                raise AssertionError("this suite forbids threads")


        def forbidden(*args, **options):
            raise AssertionError("this suite forbids it")


        threading.Thread = Forbidden
        pickle.dumps = selectors.DefaultSelector = signal.signal = queue.SimpleQueue = forbidden
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2)
        def test_ranks(rank):
            assert rank in (0, 1)


        @pytest.mark.devices
        def test_device(device):
            pass


        def test_plain():
            pass
        """,
    )
    suite.run().expect(dict.fromkeys(("test_ranks", "test_device", "test_plain"), "PASSED"))
