"""Errors of a device that stay: a test has left the device unusable for the process in which the test ran.

Under xdist the process is a worker. The worker ends after the test, and xdist starts another one in its place.
"""

from __future__ import annotations

import os
import pickle
import sys
from traceback import format_exc
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.stash_keys import DEVICE_ERROR

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


def record(item: pytest.Item) -> bool:
    """Return whether a device is unusable for this process after `item`; if so, add the error to the next report."""
    from pytest_accel.rank.torch_devices import sticky_error

    error = sticky_error(sys.modules["torch"])
    if error is None:
        return False
    item.user_properties.append((DEVICE_ERROR, error))
    return True


def keeps_workers(config: pytest.Config) -> bool:
    """Return True if xdist would start no worker in place of one that has ended (``--max-worker-restart 0``)."""
    return str(getattr(config.option, "maxworkerrestart", None)) == "0"


def end_worker(item: pytest.Item, session: AccelSession) -> None:
    """End this xdist worker after `item`, whose reports have been sent; return only if xdist would not replace it.

    The fixtures that `item` has kept for later tests are torn down first. To the controller, the worker has crashed.
    `xdist_hooks.py` keeps it from reporting a crashed test.
    """
    if keeps_workers(item.config):
        return
    from pytest_accel.core.shims import finish_lost_worker, tear_down_after
    from pytest_accel.pool.pool_messages import EndAfterTest

    try:
        tear_down_after(item, None)
        end = EndAfterTest(item.session.items.index(item))
        item.config.workerinput["accel_channel"].send(pickle.dumps(end))  # type: ignore[attr-defined]
        finish_lost_worker(item.session)
    except Exception:
        session.pool_client.show(f"accel: the end of a worker failed after {item.nodeid}:\n{format_exc()}")
    finally:
        os._exit(1)
