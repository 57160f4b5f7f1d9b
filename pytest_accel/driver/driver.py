"""Runs the marked items of one pytest process, and keeps its world from test to test."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.messages import When
from pytest_accel.core.world_key import WorldShape
from pytest_accel.diagnostics.inspector import WorldInspector
from pytest_accel.driver.debugger_relay import Lending
from pytest_accel.driver.debugger_terminal import is_interactive, lent
from pytest_accel.driver.log_tail import Streams
from pytest_accel.driver.world import LostWorld, World
from pytest_accel.leases.locks import Holder
from pytest_accel.pool.records import Grant, PoolError
from pytest_accel.verdict import judgement, remote_exceptions, report_text

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.pool.pool_client import Port
    from pytest_accel.settings.options import Settings


class Driver:
    """Runs the marked items of one pytest process, one at a time, and keeps its world from test to test."""

    def __init__(self, config: pytest.Config, settings: Settings, port: Port, session_kind: str | None) -> None:
        self.config = config
        self.session_kind = session_kind
        self.settings = settings
        self._port = port
        option = config.option
        self.streams = getattr(option, "capture", "no") == "no" and getattr(option, "dist", "no") == "no"
        """Whether the ranks' output is shown while they run: one test after the other, then."""
        self._interactive = is_interactive(config)
        self._world: World | None = None
        self._shape: WorldShape | None = None
        self._error: BaseException | None = None
        self._next: MarkedItem | None = None
        self._running: MarkedItem | None = None
        self._told: MarkedItem | None = None
        """The test that the world's ranks go on to if they all pass the one that they run."""
        self._ahead: MarkedItem | None = None
        """A test that the world's ranks have begun and whose setup phase has not been asked for."""

    def prepare(self, marked: MarkedItem, following: MarkedItem | None) -> None:
        """Wait for the test's world before its phases begin, so that no other plugin's clock counts the waiting.

        `following` is the very next test, if it has marks.
        """
        self._next = following
        if marked.missing is None:
            try:
                self._have(marked)
            except (Exception, pytest.fail.Exception) as error:
                self._error = error  # To be raised in the setup phase, where it is this test's error.

    def begin(self, marked: MarkedItem) -> World:
        """Have the test begun; gives its world: a new one where the last has been harmed, as in a rerun."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._running = marked
        world = self._have(marked)
        if self._ahead is None:
            self._send(world, marked)
        self._ahead = None
        following = self._next
        if (
            following is not None
            and not self.streams
            and world.grant.spec.near
            and marked.is_sure_to_run
            and following.is_sure_to_run
            and self._stays(world, following)
        ):
            self._told = following
            self._send(world, following, ahead=True)
        return world

    def _send(self, world: World, marked: MarkedItem, *, ahead: bool = False) -> None:
        following = marked.following.node if marked.following else None
        world.send(marked.node, marked.item.location, following, last=marked.last, ahead=ahead)

    def _stays(self, world: World, following: MarkedItem) -> bool:
        """Whether the world is to run `following` too."""
        return (
            following.missing is None
            and following.shape == self._shape
            and not following.shape.fresh
            and not self._port.wanted(world.number)
        )

    def _have(self, marked: MarkedItem) -> World:
        world = self._world
        if world is not None and self._ahead is marked:
            return world  # Whatever has become of it is this test's to tell.
        if world is not None:
            self._look_ahead(world)
        unfit = (
            self._ahead is not None
            or self._shape != marked.shape
            or (world is not None and marked.shape.fresh and world.used)
        )
        if world is not None and (unfit or world.worn or not world.alive or world.harm is not None):
            self._close()
            world = None
        while world is None:
            try:
                world = self._acquire(marked)
            except LostWorld:
                self._close()
        return world

    def _acquire(self, marked: MarkedItem) -> World:
        holder = Holder.here(marked.item.nodeid)
        try:
            patience = self.settings.wait if marked.shape.need is not None else None
            grant = self._port.acquire(marked.shape, holder, patience)
        except PoolError as error:
            raise remote_exceptions.not_run(str(error)) from None
        try:
            on_quiet = self._show_progress if self._interactive and not self.streams else None
            world = self._world = World(grant, self._port, self._lending(grant), self._streams(grant), on_quiet)
        except OSError as error:  # As where a test has left this process no file descriptors.
            self._port.release(grant.spec.world, "its driver could not connect to it", frozenset(), worn=False)
            raise remote_exceptions.not_run(f"could not connect to the test's ranks: {error}") from None
        self._shape = marked.shape
        unready = world.start()
        if unready is not None:
            judged = judgement.judge("setup", unready, place=marked.place, about=marked.shape.about)
            self._close()
            raise remote_exceptions.not_run(judgement.plain_text(judged))
        return world

    def _lending(self, grant: Grant) -> Lending:
        terminal = None if hasattr(self.config, "workerinput") else partial(lent, self.config)
        return Lending(terminal, grant.spec.ranks, self.settings.pdb_rank)

    def _streams(self, grant: Grant) -> Streams | None:
        if not self.streams:
            return None
        kept = self.settings.logs is not None
        return Streams(WorldInspector(grant.directory, grant.spec), grant.spec.ranks, _show, kept=kept)

    def _look_ahead(self, world: World) -> None:
        """Find out whether the ranks have gone on to the test that they were told of."""
        told, self._told = self._told, None
        if told is not None and world.goes_on:
            self._ahead = told

    def after(self, following: MarkedItem | None) -> None:
        """Keep the world if the very next test wants the same and nobody else waits, else give it back."""
        self._error = None
        world = self._world
        if world is None:
            return
        self._look_ahead(world)
        if self._ahead is not None and self._ahead is following and world.harm is None:
            world.follow()
        elif (
            following is None
            or self._ahead is not None
            or not self._stays(world, following)
            or world.harm is not None
            or world.worn
            or not world.alive  # A death that no test has told of is then not the next one's.
        ):
            self._close()
        elif following.is_sure_to_run and not self.streams:
            # Its ranks are at work while pytest comes round to it.
            self._ahead = following
            self._send(world, following)

    def _show_progress(
        self, when: When, seconds: float, timeout: float, places: dict[int, str], collectives: list[str]
    ) -> None:
        assert self._running is not None
        here, test = str(self.config.invocation_params.dir), self._running.item.nodeid
        self._port.show(report_text.progress(test, when, seconds, timeout, places, collectives, here))

    def look_at_interrupted(self, marked: MarkedItem) -> None:
        """Have it noted where the ranks of `marked` are, since the session is interrupted while it runs."""
        if self._world is not None:
            self._port.look_at_interrupted(self._world.number, marked.item.nodeid)

    def end_world(self, reason: str) -> None:
        """Have the world killed."""
        if self._world is not None:
            self._world.harm = self._world.harm or reason
            self._close()

    def close(self) -> None:
        """The last test has run."""
        self._close()

    def _close(self) -> None:
        world, self._world = self._world, None
        ahead, self._ahead, self._told = self._ahead, None, None
        if world is not None:
            if ahead is not None:
                world.harm = world.harm or f"it runs {ahead.item.nodeid}, which is not to be run after all"
            world.close()


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
