"""Plans as Spark 4.1 prints them, and what they scan."""

import pytest

from branchlake_dagster.runs.provenance import candidate_keys
from branchlake_dagster.spark.plan_reads import PlanReads, parse_plan, split_name


def plan(*lines: str) -> str:
    analysed = "\n".join(lines)
    return (
        f"== Parsed Logical Plan ==\n'UnresolvedRelation [x]\n\n== Analyzed Logical Plan ==\n{analysed}\n\n"
        "== Optimized Logical Plan ==\nLocalRelation\n\n== Physical Plan ==\nLocalTableScan\n"
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("RelationV2[id#1L, v#2L] nessie.lake.a", ("nessie", "lake", "a")),
        (":           +- RelationV2[id#1L] nessie.lake.a", ("nessie", "lake", "a")),
        ("   :  +- RelationV2[] nessie.lake.a", ("nessie", "lake", "a")),
        ("RelationV2[id#1] nessie.exp.`we``ird.t x`", ("nessie", "exp", "we`ird.t x")),
        ("RelationV2[a] nessie.other.b#1, c#2] nessie.lake.a", ("nessie", "lake", "a")),
        ("RelationV2[id#1] nessie.lake.a VERSION AS OF '4210201867085658523'", ("nessie", "lake", "a")),
        ("RelationV2[id#1] nessie.lake.a TIMESTAMP AS OF 1786000000000000", ("nessie", "lake", "a")),
        ("RelationV2[id#1] nessie.lake.`a@main`", ("nessie", "lake", "a@main")),
        (
            "+- ResolvedTable org.apache.iceberg.spark.SparkCatalog@73853fb7, exp.a, nessie.exp.a, [id#2134L]",
            ("nessie", "exp", "a"),
        ),
    ],
)
def test_a_relation_is_found_by_its_name(line: str, name: tuple[str, ...]) -> None:
    assert parse_plan(plan("Project [id#1]", line)) == PlanReads(frozenset({name}))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Call nessie.system.rewrite_data_files(exp.a)", "a procedure"),
        ("StreamingRelationV2 nessie, iceberg", "a stream"),
        ("RelationV2[a", "a relation without a name"),
        ("RelationV2[id#1] nessie.`file:/warehouse/x`", "a table by its path"),
    ],
)
def test_an_object_without_a_name_is_reported(line: str, what: str) -> None:
    assert parse_plan(plan("+- " + line)) == PlanReads(unnamed_reads=frozenset({what}))


def test_what_is_only_written_is_not_read() -> None:
    lines = [
        "AppendData RelationV2[id#1] nessie.lake.a, false",
        "+- Project [1 AS id#2]",
        "   +- OneRowRelation",
    ]
    assert not parse_plan(plan(*lines))


def test_a_text_that_looks_like_a_headline_hides_nothing() -> None:
    lines = ["Project [", "== Optimized Logical Plan ==", " AS x#1]", "+- RelationV2[id#1] nessie.lake.a"]
    assert parse_plan(plan(*lines)).tables == {("nessie", "lake", "a")}


def test_names_apart() -> None:
    assert split_name("nessie.`a.b`.`c``d`") == ("nessie", "a.b", "c`d")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (("lake", "a"), [("lake", "a")]),
        (("lake", "a", "files"), [("lake", "a", "files"), ("lake", "a")]),
        (("lake", "a", "snapshot_id_12", "files")[:3], [("lake", "a", "snapshot_id_12"), ("lake", "a")]),
        (("lake", "files"), [("lake", "files")]),
        (("lake", "a@run-1"), [("lake", "a@run-1"), ("lake", "a")]),
    ],
)
def test_which_tables_a_name_may_mean(name: tuple[str, ...], meant: list[tuple[str, ...]]) -> None:
    assert candidate_keys(name) == meant
