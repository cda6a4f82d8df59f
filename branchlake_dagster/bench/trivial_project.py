"""The code location of the floor: one asset that does nothing, kept nowhere."""

from typing import Any

import dagster as dg


class DiscardingIOManager(dg.IOManager):
    """Keeps nothing."""

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Forget it."""

    def load_input(self, context: dg.InputContext) -> None:
        """There is nothing to load."""


@dg.asset
def trivial() -> int:
    """One."""
    return 1


defs = dg.Definitions(
    assets=[trivial],
    jobs=[dg.define_asset_job("trivial_job", [trivial])],
    resources={"io_manager": DiscardingIOManager()},
    executor=dg.in_process_executor,
)
