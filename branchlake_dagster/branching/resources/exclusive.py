"""Which leases the running job needs: the names under which the assets that it writes are exclusive."""

from __future__ import annotations

from branchlake_dagster.branching.table.spec import exclusive_name
from branchlake_dagster.internals.dagster import running_context


class ExclusiveNames:
    """Those of one run. Nobody knows them outside its steps, so what a step has told is remembered."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None

    def __call__(self) -> frozenset[str]:
        """The names; none where no step runs in this thread and none has told them."""
        if self._known is None:
            context = running_context()
            if context is None:
                return frozenset()
            job = context.op_execution_context.get_step_execution_context().job_def
            told = (
                exclusive_name(spec.metadata, spec.key.to_user_string())
                for one in job.asset_layer.data
                for spec in one.assets_def.specs
            )
            self._known = frozenset(name for name in told if name)
        return self._known
