"""The lake and the run's branch as a Dagster resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import ConfigurableResource, InitResourceContext
from pydantic import PrivateAttr

from branchlake_dagster.branching.errors import RetryNeedsFullRun
from branchlake_dagster.branching.run_branch import RunBranch
from branchlake_dagster.lakehouse.catalog import NessieCatalog
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.settings import Settings


class LakehouseResource(ConfigurableResource[Any]):
    """The lake, and inside a run the run's branch of it.

    Its settings come from the environment (`BRANCHLAKE_…`) and `settings` overrides single fields.
    Outside a run (a sensor, a notebook) it stands on `main`.
    """

    settings: dict[str, Any] = {}  # noqa: RUF012 - a pydantic field, copied per instance

    _lakehouse: Lakehouse | None = PrivateAttr(default=None)
    _run_branch: RunBranch | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: InitResourceContext) -> None:
        """Bind to the run. Touches neither Nessie nor Spark: a run that uses no table gets no branch."""
        run, instance = context.run, context.instance
        if run is None or instance is None or instance.get_run_by_id(run.run_id) is None:
            return
        if run.parent_run_id and run.step_keys_to_execute:
            raise RetryNeedsFullRun(
                "A retry of single steps cannot see its parent's outputs, which were on the parent's branch.",
                run_id=run.run_id,
                hint="Re-execute all steps instead.",
            )
        run_id = run.run_id

        def tags() -> Mapping[str, str]:
            found = instance.get_run_by_id(run_id)
            return found.tags if found else {}

        def remember(new: Mapping[str, str]) -> None:
            instance.add_run_tags(run_id, dict(new))

        self._run_branch = RunBranch(lambda: self.lakehouse.nessie, run_id, tags=tags, remember=remember)

    @property
    def lakehouse(self) -> Lakehouse:
        """The connections of this process."""
        if self._lakehouse is None:
            self._lakehouse = Lakehouse(Settings(**self.settings))
        return self._lakehouse

    @property
    def run_branch(self) -> RunBranch | None:
        """The branch of the current run; None outside a run."""
        return self._run_branch

    def ref(self) -> str:
        """Where reads and writes go now: the run's branch, made if needed, or `main` outside a run."""
        return self._run_branch.open() if self._run_branch else MAIN

    def catalog(self) -> NessieCatalog:
        """PyIceberg's catalogue on `ref()`."""
        return self.lakehouse.catalog(self.ref())
