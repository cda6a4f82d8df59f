"""Which partitions an older code version has computed, also where a snapshot does not list all of them."""

# No postponed annotations: Dagster reads those of assets.
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner

from branchlake_dagster import table_metadata
from branchlake_dagster.automation.backfill_plan import (
    RecordedWrite,
    StalePartitions,
    classify_partitions,
    find_stale_partitions,
)
from branchlake_dagster.cli import backfill
from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.recorded_partitions import RecordedPartitions, format_partitions
from branchlake_dagster.tables.replaced_rows import ReplacedRows, StringSet, ValueRange
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import place
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

MANY = tuple(f"k{number:02}" for number in range(40))


def asset_of(namespace: str, keys: Sequence[str], version: str, **how: Any) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"],
        partitions_def=dg.StaticPartitionsDefinition([*keys]),
        metadata=table_metadata(partition_by="part", require_checks=False, **how),
        code_version=version,
    )
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"part": [*context.partition_keys]})

    return t


def written(p: Project, first: str, last: str) -> None:
    p.settle(
        p.run(tags={"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last})
    )


def stale(p: Project, namespace: str) -> StalePartitions:
    return find_stale_partitions(p.graph, p.lake, dg.AssetKey([namespace, "t"]), instance=p.instance)


def test_a_run_of_more_partitions_than_a_snapshot_lists(lakehouse: Lakehouse, namespace: str) -> None:
    with project(lakehouse, asset_of(namespace, MANY, "1")) as p:
        written(p, MANY[0], MANY[-1])
        assert stale(p, namespace) == StalePartitions(())
    with project(lakehouse, asset_of(namespace, MANY, "2")) as p:
        assert stale(p, namespace) == StalePartitions(MANY)
        written(p, MANY[3], MANY[32])
        assert stale(p, namespace) == StalePartitions((*MANY[:3], *MANY[33:]))


def test_what_an_append_does_not_list_is_unknown(lakehouse: Lakehouse, namespace: str) -> None:
    for version, last in (("1", MANY[-1]), ("2", MANY[29])):
        with project(lakehouse, asset_of(namespace, MANY, version, write_mode="append")) as p:
            written(p, MANY[0], last)
            if version == "2":
                assert stale(p, namespace) == StalePartitions((), unknown=MANY[20:])
                request = backfill.build_request(place(p), f"{namespace}/t", [], everything=False)
                assert request == backfill.BackfillRequest(
                    dg.AssetKey([namespace, "t"]), (), request.why if request else "", MANY[20:]
                )


def test_keys_with_commas(lakehouse: Lakehouse, namespace: str) -> None:
    keys = ("DE,AT", "FR", "DE", "AT")
    with project(lakehouse, asset_of(namespace, keys, "1", write_mode="append")) as p:
        for key in keys:
            p.settle(p.run(partition=key))
    with project(lakehouse, asset_of(namespace, keys, "2", write_mode="append")) as p:
        p.settle(p.run(partition="DE,AT"))
        assert stale(p, namespace) == StalePartitions(("FR", "DE", "AT"))
        written(p, "DE,AT", "FR")
        p.settle(p.run(partition="DE"))
        assert stale(p, namespace) == StalePartitions(("AT",))


def write(version: str, record: str, replaced: ReplacedRows | None = None) -> RecordedWrite:
    return RecordedWrite(version, RecordedPartitions.parse(record), replaced)


ROWS = {key: ReplacedRows(((StringSet(1, frozenset({key})),),)) for key in MANY}
SOME = format_partitions(MANY[5:35])


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        # A predicate of exactly the written partitions.
        (
            [write("2", SOME, ReplacedRows(((StringSet(1, frozenset(MANY[5:35])),),)))],
            StalePartitions(()),
        ),
        (
            [
                write("2", SOME, ReplacedRows(((ValueRange(1, "string", MANY[5], MANY[34]),),))),
                write("1", format_partitions(MANY), ReplacedRows(((),))),
            ],
            StalePartitions((*MANY[:5], *MANY[35:])),
        ),
        # A predicate that was widened to more partitions than were written.
        (
            [write("2", SOME, ReplacedRows(((),))), *(write("1", key) for key in MANY)],
            StalePartitions((), unknown=(*MANY[:5], *MANY[25:])),
        ),
        # Whether the shortened list has the partition or not, an older version computed it.
        ([write("1", SOME), *(write("0", key) for key in MANY)], StalePartitions(MANY)),
        ([write("1", SOME)], StalePartitions(MANY[5:25], unknown=(*MANY[:5], *MANY[25:]))),
        ([write("2", SOME)], StalePartitions(())),
        ([], StalePartitions(())),
    ],
)
def test_partitions_by_their_writes(writes: list[RecordedWrite], expected: StalePartitions) -> None:
    assert classify_partitions(MANY, writes, "2", ROWS.__getitem__) == expected


@pytest.mark.parametrize(
    ("keys", "record", "unknown"),
    [
        (("a,b", "a", "b", "c"), "a,b", ("a,b", "a", "b")),
        (("a,b", "a", "c"), "c", ()),
        (("a", "b"), "a,b", ()),
    ],
)
def test_commas_in_records_of_older_versions(
    keys: tuple[str, ...], record: str, unknown: tuple[str, ...]
) -> None:
    found = classify_partitions(keys, [write("1", record)], "2", None)
    assert found.unknown == unknown


def test_the_commands_name_what_is_unknown(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = f"{namespace}/t"
    for version, last in (("1", MANY[-1]), ("2", MANY[29])):
        with project(lakehouse, asset_of(namespace, MANY, version, write_mode="append")) as p:
            written(p, MANY[0], last)
            if version == "2":
                opened = nullcontext(place(p))
                monkeypatch.setattr(backfill, "open_location", lambda _, opened=opened: opened)
                for command, answer in (("plan", []), ("run", {"backfill": None})):
                    result = CliRunner().invoke(main, ["backfill", command, asset, "--json"])
                    assert (json.loads(result.stdout), result.exit_code) == (answer, 0)
                    assert MANY[20] in result.stderr
