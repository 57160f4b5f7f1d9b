"""Tests of sessions on machines on which something is missing that every session needs: a folder, a disk, a network."""

from __future__ import annotations

import getpass
import subprocess

import pytest

from tests.background_suite import PYTEST, BackgroundSuite

pytestmark = pytest.mark.usefixtures("without_torch")


def in_namespace(*flags: str) -> tuple[str, ...]:
    """Return the command that runs another one in namespaces of its own; skip the test if that is not possible."""
    command = ("unshare", *flags)
    try:
        possible = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        possible = False
    if not possible:
        pytest.skip(f"{' '.join(command)} is not possible here: it needs Linux and root")
    return command


WITH_TEMPORARY_FOLDERS = """
    import pytest


    @pytest.mark.distributed(2, init=False)
    def test_without():
        pass


    @pytest.mark.distributed(2, init=False)
    def test_with(tmp_path, shared_tmp_path):
        (tmp_path / "a").touch()
        (shared_tmp_path / "b").touch()


    def test_in_the_driver(tmp_path):
        pass
"""


def test_a_base_temporary_folder_that_cannot_be_made_is_a_usage_error(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", WITH_TEMPORARY_FOLDERS)
    run = suite.run("--basetemp=test_it.py/base")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --basetemp=test_it.py/base: Not a directory; allowed is a folder that" in run.text


def test_ranks_have_folders_if_the_default_of_pytest_cannot_be_used(suite: BackgroundSuite) -> None:
    for name in (getpass.getuser(), "unknown"):
        (suite.temporary / f"pytest-of-{name}").touch()  # As if another user had it.
    suite.write("test_it.py", WITH_TEMPORARY_FOLDERS)
    suite.run().expect({"test_without": "PASSED", "test_with": "PASSED", "test_in_the_driver": "ERROR"})


def test_a_test_that_prints_to_a_full_disk_fails_and_says_so(suite: BackgroundSuite) -> None:
    (suite.path / "small").mkdir()
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, init=False)
        def test_much():
            print("x" * 1_000_000)


        @pytest.mark.distributed(2, init=False)
        def test_next():
            pass
        """,
    )
    mounted = ("sh", "-c", 'mount -t tmpfs -o size=64k tmpfs small && exec "$@"', "sh")
    run = suite.start("--accel-output=small", program=(*in_namespace("--mount"), *mounted, *PYTEST)).finish()
    run.expect({"test_much": "FAILED", "test_next": "PASSED"})
    assert "OSError: [Errno 28] No space left on device" in run.failure("test_much")


@pytest.mark.long
def test_logs_in_a_folder_that_cannot_be_made_change_no_verdict_and_are_named(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py", "import pytest\n\n@pytest.mark.distributed(2, init=False)\ndef test_passes(): print('printed')\n"
    )
    run = suite.run("--accel-output=test_it.py/logs")
    run.expect({"test_passes": "PASSED"})
    assert (
        f"accel: no output of ranks is kept: --accel-output {suite.path}/test_it.py/logs: Not a directory" in run.text
    )
