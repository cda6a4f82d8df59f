"""A publisher that stands still in the middle of a pass, as a stopped process does, and never goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from branchlake_dagster.publication import reconciler as pass_lock

if TYPE_CHECKING:
    from branchlake_dagster_tests.simulation.world import World


class AnotherPassAtWork(Exception):  # noqa: N818 - named like the other outcomes
    """The lock of the passes is taken."""


@dataclass
class Stall:
    """The lock of the passes, where somebody holds it for ever; elsewhere passes may meet.

    As a context manager it takes the holder away.
    """

    random: Random
    _held: ExitStack = field(default_factory=ExitStack)
    _settings: Any = None

    def __post_init__(self) -> None:
        self.happens = self.random.random() < 0.1

    def __enter__(self) -> Stall:
        if self.happens:
            folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="branchlake-simulation-"))
            self._settings = SimpleNamespace(state_dir=Path(folder), lake_id="lake", publish_budget_s=30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def begin(self, world: World) -> None:
        """Take the lock some time, and stand still."""
        for _ in range(self.random.randint(0, 12)):
            world.network.sleep(1.0)
        is_ours = self._held.enter_context(self._real_pass(world))
        world.network.note("a publisher stands still" if is_ours else "another pass is at work")

    @contextmanager
    def one_pass(self, world: World) -> Iterator[bool]:
        """Whether a pass may begin."""
        if not self.happens:
            yield True
            return
        with self._real_pass(world) as is_ours:
            yield is_ours

    def _real_pass(self, world: World) -> Any:
        clock = world.clock
        return pass_lock.acquire_pass_lock(
            cast(Any, self._settings),
            clock=clock.monotonic,
            now=lambda: clock.now().timestamp(),
            sleep=world.network.sleep,
        )
