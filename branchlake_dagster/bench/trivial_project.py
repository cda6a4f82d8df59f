"""The code location of the benchmark of Dagster alone: one asset that does nothing."""

from typing import Any

import dagster as dg


class DiscardingIOManager(dg.IOManager):
    """An IO manager that stores nothing."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Discard the output."""

    def load_input(self, context: dg.InputContext) -> None:
        """Return None, because nothing is stored."""


@dg.asset
def trivial() -> int:
    """Return 1."""
    return 1


defs = dg.Definitions(
    assets=[trivial],
    jobs=[dg.define_asset_job("trivial_job", [trivial])],
    resources={"io_manager": DiscardingIOManager()},
    executor=dg.in_process_executor,
)
