"""Namespaces of `NessieCatalog` on a real Nessie."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.exceptions import (
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
)
from pyiceberg.schema import Schema

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster_tests.suite.raised import raising


@pytest.fixture
def catalog(client: NessieClient, fresh_branch: str, tmp_path: Any) -> NessieCatalog:
    return NessieCatalog.from_client(client, fresh_branch, f"file://{tmp_path}")


def test_life_of_a_namespace(catalog: NessieCatalog) -> None:
    assert not catalog.namespace_exists("a")
    catalog.create_namespace("a", {"owner": "me", "n": 1})
    assert catalog.namespace_exists("a")
    assert catalog.load_namespace_properties("a") == {"owner": "me", "n": "1"}
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("a")
    catalog.create_namespace_if_not_exists("a", {"owner": "other"})
    assert catalog.load_namespace_properties("a")["owner"] == "me"
    catalog.drop_namespace("a")
    assert not catalog.namespace_exists("a")
    with pytest.raises(NoSuchNamespaceError):
        catalog.drop_namespace("a")


def test_missing_parents_come_along_in_one_commit(catalog: NessieCatalog, client: NessieClient) -> None:
    catalog.create_namespace("a", {"k": "v"})
    catalog.create_namespace("a.b.c.d")
    assert len(list(client.log(catalog.ref))) == 2
    for name in ("a", "a.b", "a.b.c", "a.b.c.d"):
        assert catalog.namespace_exists(name)
    assert catalog.load_namespace_properties("a") == {"k": "v"}


def test_a_table_is_no_parent(catalog: NessieCatalog) -> None:
    catalog.create_namespace("a")
    catalog.create_table("a.t", Schema())
    with pytest.raises(NoSuchNamespaceError):
        catalog.create_namespace("a.t.b")
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("a.t")


def test_listing_is_one_level_deep(catalog: NessieCatalog) -> None:
    for name in ("a.b.c", "a.x", "ab.c", "b", "_", "%"):
        catalog.create_namespace(name)
    assert sorted(catalog.list_namespaces()) == [("%",), ("_",), ("a",), ("ab",), ("b",)]
    assert sorted(catalog.list_namespaces("a")) == [("a", "b"), ("a", "x")]
    assert catalog.list_namespaces(("a", "b")) == [("a", "b", "c")]
    assert catalog.list_namespaces("b") == []
    with pytest.raises(NoSuchNamespaceError):
        catalog.list_namespaces("nowhere")


@pytest.mark.parametrize("inside", ["namespace", "table"])
def test_only_empty_namespaces_are_dropped(catalog: NessieCatalog, inside: str) -> None:
    catalog.create_namespace("a")
    if inside == "namespace":
        catalog.create_namespace("a.b")
    else:
        catalog.create_table("a.t", Schema())
    with raising(NamespaceNotEmptyError, "a"):
        catalog.drop_namespace("a")


def test_properties_are_updated_together(catalog: NessieCatalog, client: NessieClient) -> None:
    catalog.create_namespace("a", {"keep": "1", "old": "2"})
    summary = catalog.update_namespace_properties("a", {"old", "absent"}, {"new": "3", "keep": "4"})
    assert summary.removed == ["old"]
    assert summary.missing == ["absent"]
    assert sorted(summary.updated) == ["keep", "new"]
    assert catalog.load_namespace_properties("a") == {"keep": "4", "new": "3"}
    before = client.reference(catalog.ref).hash
    catalog.update_namespace_properties("a", {"absent"}, {"new": "3"})
    assert client.reference(catalog.ref).hash == before
    with raising(ValueError, "x"):
        catalog.update_namespace_properties("a", {"x"}, {"x": "1"})
    with raising(NoSuchNamespaceError, "nowhere"):
        catalog.update_namespace_properties("nowhere", updates={"x": "1"})
    with raising(NoSuchNamespaceError, "nowhere"):
        catalog.load_namespace_properties("nowhere")


@pytest.mark.parametrize("properties", [{None: "v"}, {"k": None}, {"": "v"}])
def test_properties_are_texts(catalog: NessieCatalog, properties: dict[Any, Any]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - pydantic's error too
        catalog.create_namespace("a", properties)
    assert str(next(name for name in (*properties, *properties.values()) if not name)) in str(refused.value)


@pytest.mark.parametrize("name", ["", " ", "a..b", (), ("a", "")])
def test_empty_names(catalog: NessieCatalog, name: Any) -> None:
    with pytest.raises(NoSuchNamespaceError):
        catalog.create_namespace(name)
    with pytest.raises(NoSuchNamespaceError):
        catalog.namespace_exists(name)
