"""ApprovalTests: only rank 0 of a test verifies.

`verify` writes the received file beside the approved one, compares both, and removes the received file if they are
equal. A rank could remove the file of another one before that one compares, and a healthy test would fail.
"""

from __future__ import annotations

from typing import NoReturn

import pytest

from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, take
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge("approvaltests", damage="ranks would overwrite and remove each other's received files")


def plugin(config: pytest.Config) -> None:
    """In ranks other than 0, have `verify` fail."""
    approver = take("approvaltests.file_approver", "FileApprover")
    require(approver, "verify")
    if RANK in config.stash and config.stash[RANK].rank:
        approver.verify = staticmethod(_refuse)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(
        "ApprovalTests' verify() works in rank 0 alone, since all ranks would write the same files: "
        "use `if rank == 0: verify(...)`",
        pytrace=False,
    )
