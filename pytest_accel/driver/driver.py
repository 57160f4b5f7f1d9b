"""Runs the marked items of one pytest process, and keeps their world from test to test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_accel.compat.pytest_shims import append_to_log_file, fixtures_by_name
from pytest_accel.core.log import step
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.core.terminal_lines import write_text
from pytest_accel.diagnostics.inspector import WorldInspector
from pytest_accel.driver.debugger_relay import DebuggerRelay, lend_terminal
from pytest_accel.driver.item_plan import MarkedTest
from pytest_accel.driver.output_tail import OutputTail, shown_file
from pytest_accel.driver.world import World
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.rank_messages import CollectFile, ExitRequest
from pytest_accel.pool.pool_client import GiveBackWorld, WorldGrant
from pytest_accel.verdict import phase_verdict, sentences

if TYPE_CHECKING:
    from pytest_accel.pool.pool_client import PoolClient
    from pytest_accel.settings.options import Settings


class Driver:
    """Runs the marked items of one pytest process, one at a time, and keeps their world from test to test.

    The session owns it. At most one world is held; it goes back to the pool when the next test cannot use it.
    """

    def __init__(
        self, config: pytest.Config, settings: Settings, pool_client: PoolClient, session_kind: str | None
    ) -> None:
        self.config = config
        self.session_kind = session_kind
        self.settings = settings
        self._pool_client = pool_client
        append_to_log_file(config)
        self._world: World | None = None
        self._prepared: World | BaseException | None = None
        """The world in which the next test begins, or why it has none; None once the test has begun."""
        self._running: MarkedTest | None = None
        self._tails: dict[int, OutputTail] = {}
        """The followers of the ranks' output, by world. A follower knows what it has shown if its world comes again."""
        self._hung: set[str] = set()
        """Paths of files that the ranks of a world have not collected in time."""

    def prepare(self, marked: MarkedTest) -> None:
        """Wait until the test's ranks have collected it, before its phases begin.

        So no timeout of a test includes the wait for devices, or the imports of its file.
        """
        self._running = marked
        if marked.missing is None:
            try:
                self._prepared = self._ensure_world(marked)
            except (Exception, pytest.fail.Exception) as error:
                self._prepared = error  # Raised in the setup phase, where pytest reports it as an error of this test.

    def begin(self, marked: MarkedTest) -> World:
        """Start the test in its world, and return the world. Replace a world that must not be used again.

        If a rank cannot run the test, the test is not started, and the outcome of its setup says why.
        """
        world, self._prepared = self._prepared, None
        if isinstance(world, BaseException):
            raise world
        if world is None or world.closed:  # A plugin runs the test once more, without `prepare`.
            world = self._ensure_world(marked)
        if not world.alive and not world.refused:
            self.close()  # The pool reports the death, and this test is not blamed for it.
            world = self._ensure_world(marked)
        step("%s: begins in world %d", marked.item.nodeid, world.number)
        world.send(marked)
        return world

    def _can_keep(self, world: World, before: MarkedTest | None, following: MarkedTest) -> bool:
        """Return whether `following` can use the world after the test `before`, and nobody else waits for it."""
        if following.missing is not None or not world.fits(following.key):
            return False
        # Keep a world whose module or class fixture the next test uses: it would be torn down and set up again.
        return not self._pool_client.wanted(world.number) or _share_fixture(before, following)

    def _ensure_world(self, marked: MarkedTest) -> World:
        """Return a world whose ranks have collected the test: the current world, or else another from the pool."""
        world, node = self._world, marked.node
        if node.path in self._hung:
            raise phase_verdict.not_run("ranks did not import and collect the file in time for an earlier test")
        is_collected = world is not None and world.has_collected(node)
        # Before a test that is collected, `begin` looks whether the ranks live.
        if world is not None and not (world.fits(marked.key) and (is_collected or world.alive)):
            self.close()
            world, is_collected = None, False
        try:
            while world is None:
                world = self._acquire(marked)
            if not is_collected and not world.refused:
                project_marks = marked.item.config.stash[OWNERS].of_project
                request = CollectFile(node, marked.digest, marked.plan.devices, project_marks)
                world.collect(request)
                if world.hung_in_collection:
                    self._hung.add(node.path)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.end_world("its driver did not wait until its ranks could run the test")
            raise
        marked.expects_failure = world.expects_failure(node)
        return world

    def _acquire(self, marked: MarkedTest) -> World | None:
        """Return a world from the pool, whose ranks are ready or refuse the test; None if the world must not be used.

        Raise an error if the pool has none.
        """
        step("%s: requests a world: %s", marked.item.nodeid, marked.key.about)
        try:
            grant = self._pool_client.acquire(marked.key, marked.item.nodeid)
        except PlaceError as error:
            raise phase_verdict.not_run(str(error)) from None
        try:
            world = self._world = World(grant, self._pool_client, self._debugger_relay(grant), self._tail(grant))
        except BaseException as error:  # Return the world: it would keep its devices and slots.
            self._pool_client.give_back(GiveBackWorld(grant.spec.world, "its driver could not connect to it"))
            if not isinstance(error, OSError):
                raise
            # For example, tests have used up this process's file descriptors.
            raise phase_verdict.not_run(f"could not connect to the test's ranks: {error}") from None
        step("world %d: connected to its ranks; waits until they are ready", world.number)
        if not world.start():
            self.close()
            return None
        step("world %d: %s", world.number, "not ready" if world.refused else "ready")
        return world

    def _debugger_relay(self, grant: WorldGrant) -> DebuggerRelay:
        terminal = None if hasattr(self.config, "workerinput") else partial(lend_terminal, self.config)
        return DebuggerRelay(terminal, grant.spec.ranks, self.settings.pdb_rank)

    def _tail(self, grant: WorldGrant) -> OutputTail | None:
        """Return the object that shows the ranks' output while they run, or None if the session shows nothing."""
        config, ranks, world = self.config, grant.spec.ranks, grant.spec.world
        file = shown_file(config)
        if file is None or world in self._tails:
            return self._tails.get(world)
        show: Callable[[str], None] = partial(write_text, config)
        if file == "output" and (ranks == 1 or not config.pluginmanager.has_plugin("terminalreporter")):
            show = _show  # The output of a single rank does not begin a new line after the test's name.
        inspector = WorldInspector(grant.directory, grant.spec)
        tail = self._tails[world] = OutputTail(inspector, file, ranks, show)
        return tail

    def after(self, following: MarkedTest | None) -> None:
        """Keep the world if the next test can use it and nobody else waits for it; otherwise give it back."""
        before = self._running
        self._prepared = self._running = None
        if self._world is not None:
            self._world.refused, self._world.waited = False, 0.0
            if following is None or not self._can_keep(self._world, before, following):
                self.close()

    def end_session(self, request: ExitRequest, test: str) -> NoReturn:
        """End the world and the session, as a rank has requested in `test`, the id of a test."""
        self.end_world("a rank has requested the end of the session")
        reason = sentences.session_end(request, test)
        if hasattr(self.config, "workerinput"):  # xdist shows no reason of a worker.
            self._pool_client.show(f"accel: {reason}")
        pytest.exit(reason, returncode=request.returncode)

    def interrupt(self) -> None:
        """Record where the ranks are, and end the world, because the session is interrupted."""
        if self._world is not None:
            self._world.interrupted = self._running.item.nodeid if self._running is not None else ""
            self.end_world("the session is interrupted")

    def end_world(self, reason: str) -> None:
        """Have the pool terminate the world because of `reason`."""
        if self._world is not None:
            self._world.monitor.rule_out(reason)
            self.close()

    def close(self) -> None:
        """Give the world back to the pool; no-op if there is none."""
        world, self._world = self._world, None
        if world is not None:
            step("world %d: given back", world.number)
            world.close()


def _share_fixture(one: MarkedTest | None, other: MarkedTest) -> bool:
    """Return whether two tests use the same fixture of their module or class."""
    if one is None:
        return False
    shared = fixtures_by_name(one.item).items() & fixtures_by_name(other.item).items()
    return any(
        one.item.getparent(kind) is not None and one.item.getparent(kind) is other.item.getparent(kind)
        for scope, kind in (("class", pytest.Class), ("module", pytest.Module))
        if any(fixture.scope == scope for _, fixture in shared)
    )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
