"""The fork of a process that becomes a rank."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable

from pytest_accel.core import prctl
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.forkserver.fork_exit import disown_exit_functions, leave
from pytest_accel.forkserver.preload import let_loggers_propagate
from pytest_accel.forkserver.rank_interpreter import start_interpreter
from pytest_accel.rank.role import Role


class RankFork:
    """Forks the processes of ranks from the fork server."""

    def __init__(
        self,
        session: SessionSpec,
        installed: Installed,
        close_server: Callable[[], None],
        *,
        own_group: bool,
    ) -> None:
        """``close_server()`` closes what only the server uses; it is called in the child.

        If `own_group` is False, the child stays in the server's process group.
        """
        self._session = session
        self._installed = installed
        self._close_server = close_server
        self._own_group = own_group

    def __call__(self, wait_for_role: Callable[[], Role], *, new_interpreter: bool = False) -> int:
        """Fork a process, which becomes the rank that `wait_for_role` returns there; return its pid.

        With `new_interpreter`, the rank inherits none of the modules that the fork server has imported.
        """
        # Imported modules live as long as the ranks. Freezing keeps the ranks' garbage collections from walking through
        # them and copying their pages (pytest alone collects five times when a session ends).
        gc.freeze()
        let_loggers_propagate("torch")
        server = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                prctl.die_with_parent(server)
                self._become_child()
                if new_interpreter:
                    start_interpreter(self._session, wait_for_role())
                from pytest_accel.rank import main as rank_module

                code = rank_module.run(self._session, wait_for_role, self._installed)
            except BaseException:
                traceback.print_exc()
            finally:  # Also if print_exc() raises: the child must not go on in the server's code.
                leave(code)
        return pid

    def _become_child(self) -> None:
        gc.enable()
        disown_exit_functions()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._own_group:
            os.setsid()
        self._close_server()
