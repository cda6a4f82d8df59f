"""Tables that records name: made with their first record, known ever after, as many as may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_context import with_new_route_names
from branchlake_dagster.ingest.declaration import (
    FamilyTable,
    Ingest,
    IngestTable,
    expand_families,
    format_route_names,
    parse_route_names,
)
from branchlake_dagster.ingest.errors import AnotherIngestion, EarlierAttemptLate, PositionLost
from branchlake_dagster.ingest.ingest_batch import ingest_batch
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection, reprocess_batch
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster_tests.ingest.conftest import Driving
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.test_live import live
from branchlake_dagster_tests.suite.kafka import Broker, Message
from branchlake_dagster_tests.suite.raised import raising


def record(kind: object, **more: Any) -> bytes:
    return json.dumps({"kind": kind, **more}).encode()


def by_kind(name: str, topic: str, **more: Any) -> Ingest:
    family = IngestTable(key=[name, "of_{route}"], columns={"id": "bigint"})
    return Ingest(**{"name": name, "topics": [topic], "route_by": "kind", "tables": [family], **more})


def told(drive: Driver) -> Mapping[str, list[str]]:
    return parse_route_names(
        drive.table(-1).metadata.properties[LakeProperty.TABLES_PREFIX + drive.ingest.name]
    )


def tables(drive: Driver) -> dict[str, list[int]]:
    """The ids in each table that records have named."""
    catalog = drive.lake.catalog("main")
    return {
        one.name: sorted(catalog.load_table(tuple(one.asset.path)).scan().to_arrow()["id"].to_pylist())
        for one in drive.known.ingest.family_tables
    }


def dead(drive: Driver) -> list[tuple[str, str]]:
    return [(row["error_kind"], row["error"]) for row in drive.dead()]


# -- what is declared ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "more"),
    [("{route}/a", {}), ("x/{route}_{route}", {}), ("x/{route}", {"freshness_policy": object()})],
)
def test_a_place_for_the_route_where_none_can_be_is_refused(key: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        IngestTable(key=key, **more)


def test_a_family_is_expanded_behind_the_tables_with_keys_of_their_own() -> None:
    one = IngestTable(key="x/own", route="own")
    other = IngestTable(key="x/{route}", columns={"id": "int"}, mode="upsert", keys=["id"])
    ingest = Ingest(name="i", topics=["t"], tables=[other, one])
    full = expand_families(ingest, {"x/{route}": ["b", "a", "own", "i_dead_letters"], "gone": ["z"]})
    keys = [table.asset.to_user_string() for table in full.tables]
    assert keys == ["x/own", "x/a", "x/b"], "not those of others, nor the dead letters'"
    first = full.tables[1]
    assert isinstance(first, FamilyTable)
    assert (first.name, first.family, first.keys, first.mode) == ("a", "x/{route}", ["id"], "upsert")
    assert full.dead_letters_asset == ingest.dead_letters_asset
    assert expand_families(full, {"x/{route}": ["c"]}).family_tables[0].name == "c"
    assert len(expand_families(full, {"x/{route}": ["c"]}).tables) == 2


def test_names_come_back_from_their_text() -> None:
    assert parse_route_names(format_route_names({"x/{route}": {"b", "a"}})) == {"x/{route}": ["a", "b"]}
    with raising(ValueError):
        parse_route_names('["a"]')


# -- batches -------------------------------------------------------------------------------------------


def test_tables_come_with_their_first_records_and_stay_known(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [record("eu", id=1), record("us-2", id=2), record("eu", id=3), record(None, id=4)])
    first = drive.batch()
    assert [one.name for one in first.targets[:-1]] == [f"{namespace}.of_eu", f"{namespace}.of_us-2"]
    assert tables(drive) == {"eu": [1, 3], "us-2": [2]}
    assert told(drive) == {f"{namespace}/of_{{route}}": ["eu", "us-2"]}
    kafka.send(topic, [record("eu", id=5), record("asia", id=6), record("eu", id="no")])
    drive.batch()
    assert tables(drive) == {"asia": [6], "eu": [1, 3, 5], "us-2": [2]}
    kafka.send(topic, [record("us-2", id=7)])
    third = drive.batch()
    assert drive.look().plan.is_empty
    assert third.scan_result.new_route_names(list(third.ingest.families)) == {}, "it was read once"
    assert tables(drive)["us-2"] == [2, 7]
    assert [kind for kind, _ in dead(drive)] == ["route", "conversion"]
    # Every table says how far it is.
    table = drive.lake.catalog("main").load_table((namespace, "of_us-2"))
    assert LakeProperty.OFFSETS_PREFIX + namespace in table.metadata.properties


def test_what_names_no_table_is_a_dead_letter(driving: Driving, kafka: Broker, namespace: str) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic, most_tables=2))
    bad = ["", "a/b", "a@b", "..", "x__y", "_a", "a" * 129, "ü", 'q"', "$.a", "a\nb", "a b"]
    kafka.send(topic, [*(record(one, id=1) for one in bad), b"{", record("a" * 128, id=2)])
    drive.batch()
    assert tables(drive) == {"a" * 128: [2]}
    found = dead(drive)
    assert [kind for kind, _ in found] == ["route"] * len(bad) + ["syntax"]
    kafka.send(topic, [record("b", id=1), record("c", id=2), record("b", id=3), record("d", id=4)])
    drive.batch()
    assert tables(drive) == {"a" * 128: [2], "b": [1, 3]}, "two are allowed"
    assert sorted(text for _, text in dead(drive)[-2:]) == [
        "No table takes the route c",
        "No table takes the route d",
    ]


def test_what_could_not_be_read_at_first_is_only_dead(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    """No table is known yet, and no record names one."""
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [b"{", record("..", id=1), Message(None)])
    assert drive.batch().dead_letter_count == 3
    assert told(drive) == {}
    assert tables(drive) == {}


def test_columns_are_found_in_the_records_of_each_table(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    family = IngestTable(key=[namespace, "{route}"], route="shop-(.*)")
    every = IngestTable(key=[namespace, "every"], columns={"kind": "string"})
    drive = driving(by_kind(namespace, topic, tables=[family, every], evolve=["add"]))
    kafka.send(topic, [record("shop-a", price=1.5), record("shop-b", when="now"), record("other", x=1)])
    drive.batch()
    names = drive.lake.catalog("main").load_table
    assert names((namespace, "a")).schema().column_names == ["kind", "price"]
    assert names((namespace, "b")).schema().column_names == ["kind", "when"]
    assert drive.arrow(0)["kind"].to_pylist() == ["shop-a", "shop-b", "other"]
    # Another table, and another column of one that is there, in one batch.
    kafka.send(topic, [record("shop-c", z=True), record("shop-a", price=2, tax=0.2)])
    drive.batch()
    assert names((namespace, "c")).schema().column_names == ["kind", "z"]
    assert names((namespace, "a")).scan().to_arrow().sort_by("price").to_pylist() == [
        {"kind": "shop-a", "price": 1.5, "tax": None},
        {"kind": "shop-a", "price": 2.0, "tax": 0.2},
    ]
    assert dead(drive) == []


def test_a_dropped_table_comes_back_with_its_next_record(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [record("a", id=1), record("b", id=2)])
    drive.batch()
    drive.lake.catalog("main").drop_table((namespace, "of_a"))
    kafka.send(topic, [record("b", id=3)])
    drive.batch()
    assert tables(drive) == {"b": [2, 3]}
    kafka.send(topic, [record("a", id=4)])
    drive.batch()
    assert tables(drive) == {"a": [4], "b": [2, 3]}


def test_a_table_that_records_have_named_may_be_declared_later(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [record("a", id=1), record("b", id=2)])
    drive.batch()
    own = IngestTable(key=[namespace, "of_a"], columns={"id": "bigint"}, route="a")
    drive.ingest = replace(drive.ingest, tables=[own, *drive.ingest.tables])
    kafka.send(topic, [record("a", id=3), record("b", id=4)])
    drive.batch()
    assert tables(drive) == {"b": [2, 4]}
    assert sorted(drive.arrow(0)["id"].to_pylist()) == [1, 3]
    assert dead(drive) == []


@pytest.mark.parametrize("how", ["dropped", pytest.param("without its list", marks=pytest.mark.soak)])
def test_tables_are_found_again_without_the_dead_letters_list(
    driving: Driving, kafka: Broker, namespace: str, how: str
) -> None:
    """Otherwise all would be read again, into tables that have it."""
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [record("a", id=1), record("b", id=2)])
    drive.batch()
    catalog = drive.lake.catalog("main")
    # Somebody else's beside them, of a name that would fit.
    catalog.create_table((namespace, "of_theirs"), pa.schema([pa.field("id", pa.int64())]))
    if how == "dropped":
        catalog.drop_table((namespace, f"{namespace}_dead_letters"))
    else:
        with drive.table(-1).transaction() as change:
            change.remove_properties(LakeProperty.TABLES_PREFIX + namespace)
    assert drive.look().plan.is_empty
    kafka.send(topic, [record("b", id=3), record("theirs", id=4)])
    drive.batch()
    assert tables(drive) == {"a": [1], "b": [2, 3], "theirs": [4]}
    assert len(next(iter(told(drive).values()))) == 3


def test_tables_are_not_made_where_that_is_not_allowed(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    kafka.send(topic, [record("a", id=1)])
    drive.batch()
    drive.lake.catalog("main").create_table((namespace, "of_b"), pa.schema([pa.field("id", pa.int64())]))
    drive.ingest = replace(drive.ingest, create=False)
    kafka.send(topic, [record("a", id=2), record("b", id=3), record("c", id=4)])
    drive.batch()
    assert tables(drive) == {"a": [1, 2], "b": [3]}
    assert [text for _, text in dead(drive)] == ["No table takes the route c"]


def test_a_table_that_somebody_else_fills_is_not_taken(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic))
    other = driving(replace(drive.ingest, name=f"{namespace}_other", dead_letters=[namespace, "others"]))
    kafka.send(topic, [record("a", id=1)])
    other.batch()
    with pytest.raises(AnotherIngestion):
        drive.batch()
    catalog = drive.lake.catalog("main")
    table = catalog.load_table((namespace, "of_a"))
    offsets = table.metadata.properties[LakeProperty.OFFSETS_PREFIX + other.ingest.name]
    with table.transaction() as change:
        change.remove_properties(LakeProperty.OFFSETS_PREFIX + other.ingest.name)
    kafka.send(topic, [record("b", id=2)])
    drive.batch()
    assert tables(drive) == {"a": [1, 1], "b": [2]}, "the other one's row and its own"
    # And one that says it is ours, of which nothing is known.
    made = catalog.create_table((namespace, "of_c"), pa.schema([pa.field("id", pa.int64())]))
    with made.transaction() as change:
        change.set_properties({LakeProperty.OFFSETS_PREFIX + namespace: offsets})
    kafka.send(topic, [record("c", id=3)])
    with raising(PositionLost, reason="not_among_tables"):
        drive.batch()


def test_rows_take_each_others_place_in_tables_that_records_name(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    columns = {"id": "bigint", "v": "string"}
    family = IngestTable(key=[namespace, "of_{route}"], columns=columns, mode="upsert", keys=["id"])
    drive = driving(by_kind(namespace, topic, tables=[family]))
    kafka.send(topic, [record("a", id=1, v="x"), record("b", id=1, v="y"), record("a", id=1, v="z")])
    drive.batch()
    kafka.send(topic, [record("b", id=1, v="last"), record("c", id=9, v="new")])
    drive.batch()
    catalog = drive.lake.catalog("main")
    found = {
        one.name: catalog.load_table(tuple(one.asset.path)).scan().to_arrow().to_pylist()
        for one in drive.known.ingest.family_tables
    }
    assert found == {
        "a": [{"id": 1, "v": "z"}],
        "b": [{"id": 1, "v": "last"}],
        "c": [{"id": 9, "v": "new"}],
    }
    spaces = {
        entry.key.elements[-1]
        for entry in drive.lake.nessie.entries("main")
        if namespace in entry.key.elements
    }
    assert not [name for name in spaces if "staged" in name]


def test_dead_letters_without_a_table_are_reprocessed(
    driving: Driving, kafka: Broker, namespace: str
) -> None:
    topic = kafka.topic()
    drive = driving(by_kind(namespace, topic, most_tables=1))
    kafka.send(topic, [record("a", id=1), record("b", id=2), record("c", id=3)])
    drive.batch()
    assert tables(drive) == {"a": [1]}
    drive.ingest = replace(drive.ingest, most_tables=2)
    place = drive.place()
    session = drive.lake.spark_session(place.branch)
    try:
        there = replace(place, run_id="again", session=lambda: session)
        done = reprocess_batch(drive.ingest, there, DeadLetterSelection(kinds=["route"]))
    finally:
        session.stop()
    assert done is not None
    assert (done.scanned.counts["records"], done.scanned.counts["dead"]) == (2, 1)
    assert drive.merge(place)
    assert tables(drive) == {"a": [1], "b": [2]}
    assert len(next(iter(told(drive).values()))) == 2
    kafka.send(topic, [record("b", id=4)])
    drive.batch()
    assert tables(drive) == {"a": [1], "b": [2, 4]}


def test_a_live_run_reports_each_table(lakehouse: Lakehouse, kafka: Broker, namespace: str) -> None:
    topic = kafka.topic()
    ingest = by_kind(namespace, topic)
    with live(lakehouse, kafka, ingest) as one:
        kafka.send(topic, [record("a", id=1)])
        first = one.publish_next_batch()
        kafka.send(topic, [record("b", id=2), record("a", id=3)])
        second = one.publish_next_batch()
    assert first is not None
    assert second is not None
    catalog = lakehouse.catalog("main")
    assert sorted(catalog.load_table((namespace, "of_a")).scan().to_arrow()["id"].to_pylist()) == [1, 3]
    assert [target.name for target in second.result.targets[:2]] == [f"{namespace}.of_a", f"{namespace}.of_b"]


def test_what_an_earlier_attempt_sends_late_between_two_passes_is_not_built_on(
    driving: Driving, kafka: Broker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables that the first pass had made were loaded anew for the second one, late rows and all."""
    topic = kafka.topic()
    table = IngestTable(key=f"{namespace}/{{route}}", columns={"id": "int"})
    drive = driving(Ingest(name=namespace, topics=[topic], tables=[table], route_by="to"))
    kafka.send(topic, [b'{"id": 1, "to": "a"}'])
    place = drive.place()
    earlier, before = drive.look(place.branch), drive.look(place.branch)
    waiting = [earlier]

    def named(*arguments: Any) -> Any:
        found = with_new_route_names(*arguments)
        while waiting:
            ingest_batch(waiting.pop(), place, drive.records, tasks=2)
        return found

    monkeypatch.setattr("branchlake_dagster.ingest.batch_context.with_new_route_names", named)
    with pytest.raises(EarlierAttemptLate):
        ingest_batch(before, place, drive.records, tasks=2)
    held = drive.lake.catalog(place.branch).load_table((namespace, "a")).scan().to_arrow()
    assert held["id"].to_pylist() == [1]
