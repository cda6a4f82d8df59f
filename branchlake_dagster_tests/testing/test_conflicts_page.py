"""docs/conflicts.md: what the page says of two runs of one table is what happens."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import RunOutcome, table_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.testing import ThrowawayLake
from branchlake_dagster_tests.harness import assign_main
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.testing.documented import CONFLICTS

lakehouse = memory.lakehouse

Rows = Sequence[Mapping[str, Any]]
DAYS = dg.StaticPartitionsDefinition(["mon", "tue"])


class Shop:
    """Tables whose next rows a scenario chooses."""

    def __init__(self, lake: ThrowawayLake) -> None:
        self.lake = lake
        self.parts: list[Any] = []
        self.rows: Mapping[str, Rows] = {}

    def table(
        self,
        name: str,
        *,
        deps: Sequence[str] = (),
        days: bool = False,
        most: int | None = None,
        **metadata: Any,
    ) -> None:
        """Declare an asset; with `most` it has a check over the whole table: that many rows at most."""

        @dg.asset(
            key=["shop", name],
            deps=[["shop", dep] for dep in deps],
            partitions_def=DAYS if days else None,
            metadata=table_metadata(require_checks=most is not None, **metadata),
        )
        def table() -> pl.DataFrame:
            return pl.DataFrame(self.rows[name])

        self.parts.append(table)
        if most is not None:

            @dg.asset_check(asset=table, metadata={"branchlake/scope": "table"})
            def not_too_many(table: pl.DataFrame) -> dg.AssetCheckResult:
                return dg.AssetCheckResult(passed=table.height <= most, description=f"at most {most} rows")

            self.parts.append(not_too_many)

    def run(self, day: str | None = None, **rows: Rows) -> Any:
        """A run that has written these rows to its branch, by table."""
        self.rows = rows
        selection = dg.AssetSelection.assets(*(f"shop/{name}" for name in rows))
        return self.lake.run(self.parts, select=selection, partition=day)

    def publish(self, *runs: Any) -> list[RunOutcome]:
        return [self.lake.publish(run, self.lake.definitions(self.parts)) for run in runs]

    def start(self, day: str | None = None, **rows: Rows) -> None:
        """Give `main` its first rows."""
        (outcome,) = self.publish(self.run(day, **rows))
        assert outcome.published, outcome

    def on_main(self, name: str, column: str) -> list[Any]:
        return sorted(self.lake.polars(f"shop.{name}")[column].to_list(), key=str)


@pytest.fixture
def shop(lake: ThrowawayLake) -> Shop:
    return Shop(lake)


def section(heading: str) -> str:
    """The text of the page below a heading, in one line."""
    text = re.split(r"^## ", CONFLICTS.read_text(), flags=re.MULTILINE)
    (found,) = [one for one in text if one.startswith(f"{heading}\n")]
    return " ".join(found.replace("\n> ", " ").split())


def statuses(outcomes: Sequence[RunOutcome]) -> list[str]:
    return [str(outcome.status) for outcome in outcomes]


def assert_refused(outcome: RunOutcome, heading: str) -> None:
    """The run was refused, with a reason that the page's section quotes."""
    assert outcome.status == "refused", outcome
    (reason,) = outcome.reasons
    reason = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|(?<=commit )[0-9a-f]{16}", "…", reason)
    assert reason in section(heading)


def test_both_append_rows(shop: Shop) -> None:
    shop.table("prices", write_mode="append")
    shop.start(prices=[{"item": "bolt"}])
    a, b = shop.run(prices=[{"item": "nut"}]), shop.run(prices=[{"item": "cog"}])
    assert statuses(shop.publish(a, b)) == ["published", "published"]
    assert shop.on_main("prices", "item") == ["bolt", "cog", "nut"]


def test_they_replace_different_partitions_and_the_same(shop: Shop) -> None:
    shop.table("days", days=True, partition_by="day")
    shop.start("mon", days=[{"day": "mon", "n": 1}])
    a, b = shop.run("mon", days=[{"day": "mon", "n": 2}]), shop.run("tue", days=[{"day": "tue", "n": 3}])
    assert statuses(shop.publish(a, b)) == ["published", "published"]
    assert shop.on_main("days", "n") == [2, 3]
    a, b = (shop.run("mon", days=[{"day": "mon", "n": n}]) for n in (4, 5))
    first, second = shop.publish(a, b)
    assert first.published
    assert_refused(second, "They replace the same partition")
    assert shop.on_main("days", "n") == [3, 4]


def test_they_replace_the_whole_table(shop: Shop) -> None:
    shop.table("stock")
    shop.start(stock=[{"n": 1}])
    a, b = shop.run(stock=[{"n": 2}]), shop.run(stock=[{"n": 3}])
    first, second = shop.publish(a, b)
    assert first.published
    assert_refused(second, "They replace the whole table")
    assert shop.on_main("stock", "n") == [2]


def test_they_upsert_different_keys_and_the_same(shop: Shop) -> None:
    shop.table("colors", write_mode="upsert", keys=["k"])
    shop.start(colors=[{"k": 1, "c": "red"}])
    a, b = shop.run(colors=[{"k": 2, "c": "sky"}]), shop.run(colors=[{"k": 2000, "c": "sea"}])
    assert statuses(shop.publish(a, b)) == ["published", "published"]
    assert shop.on_main("colors", "k") == [1, 2, 2000]
    a, b = (shop.run(colors=[{"k": 1, "c": color}]) for color in ("green", "blue"))
    first, second = shop.publish(a, b)
    assert first.published
    assert_refused(second, "They upsert the same key")
    assert shop.on_main("colors", "c") == ["green", "sea", "sky"]


@pytest.mark.parametrize(
    "adding_one_is_first",
    # In this order: publication/rebase/test_rebase.py::test_new_columns_travel_with_the_run.
    [pytest.param(True, marks=pytest.mark.soak), False],
)
def test_one_adds_a_column(shop: Shop, adding_one_is_first: bool) -> None:
    shop.table("taxed", write_mode="append")
    shop.start(taxed=[{"n": 1}])
    adding, plain = shop.run(taxed=[{"n": 2, "vat": 19}]), shop.run(taxed=[{"n": 3}])
    runs = (adding, plain) if adding_one_is_first else (plain, adding)
    assert statuses(shop.publish(*runs)) == ["published", "published"]
    assert shop.on_main("taxed", "vat") == [19, None, None]


@pytest.mark.parametrize("other", [7, "seven"])
def test_both_add_a_column_of_one_name(shop: Shop, other: Any) -> None:
    shop.table("taxed", write_mode="append")
    shop.start(taxed=[{"n": 1}])
    a, b = shop.run(taxed=[{"n": 2, "vat": 19}]), shop.run(taxed=[{"n": 3, "vat": other}])
    first, second = shop.publish(a, b)
    assert first.published
    if isinstance(other, int):
        assert second.published
    else:
        assert_refused(second, "Both add a column of one name")
    assert shop.on_main("taxed", "vat") == ([19, 7, None] if isinstance(other, int) else [19, None])


def test_one_of_several_tables_overlaps(shop: Shop) -> None:
    shop.table("stock")
    shop.table("orders", write_mode="append")
    shop.start(stock=[{"n": 1}], orders=[{"n": 1}])
    a, b = shop.run(stock=[{"n": 2}]), shop.run(stock=[{"n": 3}], orders=[{"n": 3}])
    assert statuses(shop.publish(a, b)) == ["published", "refused"]
    assert (shop.on_main("stock", "n"), shop.on_main("orders", "n")) == ([2], [1])


def test_it_has_read_what_the_other_one_changed(shop: Shop) -> None:
    shop.table("prices")
    shop.table("total", deps=["prices"])
    shop.table("strict_total", deps=["prices"], isolation="serializable")
    shop.start(prices=[{"n": 1}])
    shop.start(total=[{"n": 1}], strict_total=[{"n": 1}])
    a, b = shop.run(prices=[{"n": 2}]), shop.run(total=[{"n": 5}])
    strict = shop.run(strict_total=[{"n": 5}])
    first, second, third = shop.publish(a, b, strict)
    assert first.published
    assert second.published
    assert_refused(third, "It has read what the other one changed")


def test_both_are_right_and_together_they_are_wrong(shop: Shop) -> None:
    shop.table("seats", write_mode="append", most=4)
    shop.start(seats=[{"n": 1}, {"n": 2}])
    a, b = (shop.run(seats=[{"n": n}, {"n": n + 1}]) for n in (3, 5))
    first, second = shop.publish(a, b)
    assert first.published
    assert_refused(second, "Both are right, together they are wrong")
    assert shop.on_main("seats", "n") == [1, 2, 3, 4]


def test_main_was_set_back(shop: Shop) -> None:
    shop.table("stock")
    shop.start(stock=[{"n": 1}])
    before = shop.lake.lakehouse.nessie.reference(MAIN).hash
    shop.start(stock=[{"n": 2}])
    run = shop.run(stock=[{"n": 3}])
    assign_main(shop.lake.lakehouse, before)
    (outcome,) = shop.publish(run)
    assert_refused(outcome, "`main` was set back")
    assert shop.on_main("stock", "n") == [1]
