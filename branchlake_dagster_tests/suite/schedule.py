"""Which worker gets what, and in which sequence: the longest first, so that none of them is left for the end."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDER = "branchlake_dagster_tests/"
LONGEST: tuple[str, ...] = (
    "publication/automation/test_backfill_daemon.py",
    "publication/cleanup/test_kill.py",
    "ingest/histories/test_histories.py",
    "simulation/test_simulation.py",
    "incremental/test_model.py",
    "lossy/test_lossy.py",
    "incremental/test_published_histories.py",
    "incremental/test_real_histories.py",
    "incremental/test_spark_changes.py",
    "incremental/test_killed_consumer.py",
    "ingest/histories/test_real_history.py",
    "ingest/test_daemon.py",
    "ingest/secured/test_secured.py",
    "cli/test_demo.py",
    "remote/test_remote.py",
    "ui/test_ui.py",
    "ingest/test_named_tables.py",
    "ingest/test_batches.py",
    "ingest/test_runs.py",
    "ingest/test_mutations.py",
    "branching/io/test_daily_frames.py",
    "publication/cleanup/test_killed_runs.py",
    "publication/cleanup/test_killed_daemon.py",
    "publication/automation/test_automation_daemon.py",
    "publication/reconcile/test_bad_days.py",
    "branching/sweeping/test_sweeper.py",
    "branching/io/test_spark_io.py",
    "publication/rebase/test_foreign_hands.py",
    "checks/test_assets.py",
    "baseline/test_continue.py",
    "lakehouse/test_embedded.py",
    "lakehouse/test_embedded_token.py",
    "publication/rebase/test_replaced_partitions.py",
    "cli/test_stress.py",
    "cli/test_new.py",
    "branching/resources/test_retry.py",
)
"""The modules that are begun with, in this sequence."""
SPREAD = frozenset(
    {"branching/io/test_daily_frames.py", "simulation/test_simulation.py", "incremental/test_model.py"}
)
"""Long modules whose tests go to several workers. They share nothing that is dear to make."""


def module_of(nodeid: str) -> str:
    """The module of a test, below the tests' folder."""
    return nodeid.partition("::")[0].removeprefix(FOLDER)


def scope_of(nodeid: str) -> str:
    """What goes to one worker as a whole: a module, as its fixtures may have the scope of one, or a test."""
    module = module_of(nodeid)
    return nodeid if module in SPREAD else module


def arrange(items: list[pytest.Item]) -> None:
    """The longest modules first, then the others as they were."""
    place = {module: number for number, module in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(module_of(item.nodeid), len(place)))


class LongestFirst(LoadScopeScheduling):
    """pytest-xdist's scheduling by scope, with our scopes, in the sequence of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
