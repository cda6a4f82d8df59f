"""A project whose runs fail and are retried in parts, with checks in steps of their own and in the asset's step."""

import dagster as dg
import polars as pl

from branchlake_dagster.tables.specification import table_metadata

FREE = table_metadata(require_checks=False)


class Amounts:
    """`amounts` holds one number, which a check wants positive; `report` fails as long as `report_fails`.

    `inner` is `amounts` again with its check in its own step. `noise` is the number of events that a step logs
    before it writes: it moves the counters of a run's events.
    """

    def __init__(self, namespace: str) -> None:
        self.value = 1
        self.noise = 0
        self.report_fails = True
        self.check_crashes = False
        self.outer_key = dg.AssetKey([namespace, "amounts"])
        self.inner_key = dg.AssetKey([namespace, "inner"])

        @dg.asset(key=self.outer_key)
        def amounts(context: dg.AssetExecutionContext) -> pl.DataFrame:
            for _ in range(self.noise):
                context.log_event(dg.AssetObservation("noise"))
            return pl.DataFrame({"n": [self.value]})

        @dg.asset_check(asset=amounts)
        def positive() -> dg.AssetCheckResult:
            if self.check_crashes:
                raise RuntimeError("the check crashes")
            return dg.AssetCheckResult(passed=self.value > 0)

        @dg.asset(
            key=self.inner_key, check_specs=[dg.AssetCheckSpec("positive_inside", asset=self.inner_key)]
        )
        def inner():  # Dagster reads the annotation
            passed = dg.AssetCheckResult(passed=self.value > 0, check_name="positive_inside")
            return dg.MaterializeResult(value=pl.DataFrame({"n": [self.value]}), check_results=[passed])

        @dg.asset(key=[namespace, "report"], deps=[amounts, inner], metadata=FREE)
        def report() -> pl.DataFrame:
            if self.report_fails:
                raise RuntimeError("not yet")
            return pl.DataFrame({"n": [0]})

        self.definitions = (amounts, inner, report, positive)
        self.steps = {name: f"{namespace}__{name}" for name in ("amounts", "inner", "report")}
