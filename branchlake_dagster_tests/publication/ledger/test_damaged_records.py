"""A damaged record of publications is reported, hides no publication, and stops no reader."""

from __future__ import annotations

import dagster as dg
import pytest

from branchlake_dagster.nessie.model import ContentKey, Namespace, Put
from branchlake_dagster.publication.ledger import (
    MainLog,
    Publication,
    iter_publications,
    publication_properties,
)
from branchlake_dagster.publication.new_publications import MainLogReader
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.find_publication import PublicationDamaged, find_publication
from branchlake_dagster_tests.publication.ledger.test_main_log import Main
from branchlake_dagster_tests.suite.raised import raising

_PAIR = [
    Publication(f"run-{name}", f"{name}{name}{name}{name}", "root", "passed", "ab", (f"shop.{name}",))
    for name in "ab"
]


def _commit(main: Main, properties: dict[str, str]) -> str:
    head = main.head
    return main.client.commit(
        "main",
        expected_hash=head,
        operations=[Put(ContentKey([f"n{head}"]), Namespace(None, (f"n{head}",)))],
        message="some commit",
        properties=properties,
    ).hash


@pytest.mark.parametrize(
    "name", [LakeProperty.RUN_ID, LakeProperty.ROOT_RUN_ID, LakeProperty.VERDICT, LakeProperty.BASE_HASH]
)
def test_a_short_list_drops_no_publication(name: str) -> None:
    main = Main()
    base = main.head
    _commit(main, publication_properties(_PAIR) | {name: "one"})
    main.commit("run-c")

    newest, *damaged = iter_publications(main.client)

    assert (newest.branch, newest.damaged_properties) == ("run-c", ())
    assert [(one.branch, one.tables) for one in damaged] == [(one.branch, one.tables) for one in _PAIR]
    assert {one.damaged_properties for one in damaged} == {(name,)}
    log = MainLog()
    for one in _PAIR:
        assert log.find_publication(main.client, one.branch, base_hash=base, main_hash=main.head)


def test_a_list_of_another_length_gives_no_values_to_the_wrong_run() -> None:
    main = Main()
    _commit(
        main, publication_properties(_PAIR) | {LakeProperty.TABLES: "shop.b", LakeProperty.BRANCH: "run-b"}
    )

    damaged = list(iter_publications(main.client))

    assert [(one.run_id, one.branch, one.tables) for one in damaged] == [("aaaa", "", ()), ("bbbb", "", ())]
    assert {one.damaged_properties for one in damaged} == {(LakeProperty.BRANCH, LakeProperty.TABLES)}


def test_a_missing_property_is_damage_too() -> None:
    main = Main()
    properties = publication_properties(_PAIR[:1])
    del properties[LakeProperty.TABLES]
    _commit(main, properties)

    (one,) = iter_publications(main.client)

    assert (one.branch, one.damaged_properties) == ("run-a", (LakeProperty.TABLES,))


def test_a_damaged_publication_is_not_undone() -> None:
    main = Main()
    commit = _commit(main, publication_properties(_PAIR) | {LakeProperty.TABLES: "shop.b"})
    main.commit("run-cccc")

    with raising(PublicationDamaged) as caught:
        find_publication(main.client, "aaaa")
    assert (caught.value.commit, caught.value.properties) == (commit, (LakeProperty.TABLES,))
    assert find_publication(main.client, "run-cccc").branch == "run-cccc"


def test_separators_in_the_name_of_a_table_are_kept() -> None:
    main = Main()
    tables = ("shop.a,b", "shop.c;d", "shop.50%2C")
    _commit(main, publication_properties([Publication("run-a", "a", "a", "passed", "ab", tables), _PAIR[1]]))

    first, second = iter_publications(main.client)

    assert (first.tables, first.damaged_properties) == (tables, ())
    assert second.tables == ("shop.b",)


def test_a_sensor_names_the_damaged_commit_and_reads_on() -> None:
    main = Main()
    start = main.head
    commit = _commit(main, publication_properties(_PAIR) | {LakeProperty.TABLES: "shop.b"})
    _commit(main, publication_properties(_PAIR[:1]))
    with dg.DagsterInstance.ephemeral() as instance:
        new = MainLogReader(main.client, instance, {"shop.a": dg.AssetKey("a")}).read_since(start)

    assert [one.publication.branch for one in new.publications] == ["run-a"]
    assert commit[:12] in new.note
    assert new.cursor == main.head
