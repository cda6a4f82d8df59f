"""A lake as whoever reads it from outside sees it: `main`, branches, runs in every state, and the past."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.cli import main
from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.query import LakeReader, QueryFailed, TableNotThere, connect
from branchlake_dagster.query.reference import NoSuchState
from branchlake_dagster.runs.discarding import discard_branch
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse


@pytest.fixture
def reader(lakehouse: Lakehouse) -> LakeReader:
    return connect(lakehouse.settings)


@pytest.fixture
def prices(lakehouse: Lakehouse, namespace: str) -> str:
    """`<namespace>.prices` on `main`, with two rows."""
    catalog = lakehouse.catalog()
    catalog.create_namespace(namespace)
    rows = pa.table({"item": ["bolt", "nut"], "eur": [0.2, 0.1], "tags": [["a"], None]})
    catalog.create_table((namespace, "prices"), rows.schema).append(rows)
    return f"{namespace}.prices"


def count(reader: LakeReader, table: str, **state: Any) -> int:
    with reader.sql(f"SELECT count(*) AS n FROM {table}", **state) as result:
        return int(result.arrow()["n"][0].as_py())


def call(lakehouse: Lakehouse, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["sql", *arguments], env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)}
    )


# -- states --------------------------------------------------------------------------------------------


@pytest.fixture
def run(lakehouse: Lakehouse, prices: str) -> Iterator[str]:
    """A run that has added a row on its branch; whatever becomes of that."""
    run_id = str(uuid.uuid4())
    nessie = lakehouse.nessie
    nessie.create_branch(f"run-{run_id}", from_ref="main", from_hash=nessie.reference("main").hash)
    rows = pa.table({"item": ["pin"], "eur": [-1.0], "tags": [[]]}, schema=None)
    table = lakehouse.catalog(f"run-{run_id}").load_table(tuple(prices.split(".")))
    table.append(rows.cast(table.schema().as_arrow()))
    yield run_id
    for name in (f"run-{run_id}", f"discarded-{run_id}", f"sweeping-{run_id}"):
        for ref in nessie.references(filter=f"ref.name == '{name}'"):
            delete = nessie.delete_branch if ref.type == "BRANCH" else nessie.delete_tag
            delete(name, expected_hash=ref.hash)


def test_a_run_is_read_by_its_id_on_its_branch_and_after_it_was_discarded(
    lakehouse: Lakehouse, reader: LakeReader, prices: str, run: str
) -> None:
    assert count(reader, prices) == 2
    assert count(reader, prices, branch=f"run-{run}") == 3
    assert count(reader, prices, run=run) == 3
    assert reader.find_state(run=run[:8]).label == f"run {run}, on its branch"
    tag = discard_branch(lakehouse.nessie, lakehouse.nessie.reference(f"run-{run}"))
    assert tag is not None
    assert count(reader, prices, run=run[:8]) == 3
    assert reader.find_state(run=run).label == f"run {run}, as it was discarded"
    lakehouse.nessie.create_tag(f"sweeping-{run}", from_ref="main", from_hash=tag.hash)
    lakehouse.nessie.delete_tag(tag.name, expected_hash=tag.hash)
    with raising(NoSuchState, reason="being_deleted", subject=run):
        reader.find_state(run=run)


@dg.asset(metadata=table_metadata(write_mode="append", require_checks=False), key=["told", "rows"])
def told_rows() -> pa.Table:
    return pa.table({"n": [1]})


def test_a_published_run_is_read_as_its_publication_left_main(
    lakehouse: Lakehouse, reader: LakeReader, namespace: str
) -> None:
    key = dg.AssetKey([namespace, "rows"])
    asset = told_rows.with_attributes(asset_key_replacements={told_rows.key: key})
    with project(lakehouse, asset) as found:
        runs = [published(found, key) for _ in range(2)]
    table = f"{namespace}.rows"
    assert [count(reader, table, run=run) for run in runs] == [1, 2]
    assert reader.find_state(run=runs[0]).label == f"run {runs[0]}, as it was published on main"


def published(found: Project, key: dg.AssetKey) -> str:
    run = found.run(key)
    assert found.settle(run).publication
    return run


@pytest.mark.nessie
def test_main_as_it_was(lakehouse: Lakehouse, reader: LakeReader, prices: str) -> None:
    before = lakehouse.nessie.reference("main").hash
    (entry,) = lakehouse.nessie.log("main", limit=1)
    moment = entry.commit.commit_time
    assert moment is not None
    table = lakehouse.catalog().load_table(tuple(prices.split(".")))
    table.append(table.scan().to_arrow())
    assert count(reader, prices) == 4
    naive = moment.astimezone(UTC).replace(tzinfo=None).isoformat()
    for at in (before, before[:12], moment, naive, f"{naive}Z"):
        assert count(reader, prices, at=at) == 2, at
    for at in (date(2999, 1, 1), datetime.max, "9999-12-31T23:59:59.999999", "9999-12-31T23:59-12:00"):
        assert count(reader, prices, at=at) == 4, at
    assert count(reader, prices, at=datetime.now(UTC) + timedelta(days=1)) == 4
    assert count(reader, prices, branch=f"main@{before}") == 2


@pytest.mark.parametrize(
    ("state", "reason", "subject"),
    [
        ({"branch": "absent"}, "no_reference", "absent"),
        ({"run": "00000000-aaaa"}, "run_left_nothing", "00000000-aaaa"),
        pytest.param(
            {"at": "1999-01-01"}, "before_first_commit", "1999-01-01T00:00:00Z", marks=pytest.mark.nessie
        ),
        pytest.param(
            {"at": "19990101"}, "before_first_commit", "1999-01-01T00:00:00Z", marks=pytest.mark.nessie
        ),
        ({"at": "00000000aa"}, "no_commit", "00000000aa"),
        ({"at": "0" * 64}, "no_commit", "0" * 64),
    ],
)
def test_a_state_that_does_not_exist(
    reader: LakeReader, state: dict[str, str], reason: str, subject: str
) -> None:
    with raising(NoSuchState, reason=reason, subject=subject):
        reader.find_state(**state)


# -- names and forms -----------------------------------------------------------------------------------


def test_names_of_any_depth_case_and_character(
    lakehouse: Lakehouse, reader: LakeReader, namespace: str
) -> None:
    catalog = lakehouse.catalog()
    rows = pa.table({"n": [1]})
    keys = [
        (namespace, "t"),
        (namespace, "Inner", "t"),
        (namespace, "Inner", "most", "t"),
        (namespace, 'we"ird & 100%', "ta.ble+"),
    ]
    for number, key in enumerate(keys, start=1):
        for depth in range(1, len(key)):
            catalog.create_namespace_if_not_exists(key[:depth])
        table = catalog.create_table(key, rows.schema)
        for _ in range(number):
            table.append(rows)
    names = [
        f"{namespace}.t",
        f"{namespace}.inner.t",
        f'{namespace}."Inner.most".t',
        f'{namespace}."we""ird & 100%"."ta.ble+"',
    ]
    assert [count(reader, name) for name in names] == [1, 2, 3, 4]
    assert count(reader, f"{names[0]} JOIN {names[1]} USING (n) JOIN {names[2]} USING (n)") == 6
    assert set(names) - set(reader.tables()) == {names[1]}, "written as the lake has it: in quotes"
    assert [reader.table(f"{namespace}.Inner.most.t").scan().to_arrow().num_rows] == [3]
    with raising(TableNotThere, "main", f"{namespace}.t?", subject=f"{namespace}.tt"):
        reader.sql(f"FROM {namespace}.tt")
    with raising(QueryFailed, '."Inner.most".t', reason="more_than_three_levels"):
        reader.sql(f'FROM {namespace}."Inner".most.t')


@pytest.mark.parametrize("name", ["", "a.", ".", "`"])
def test_what_is_not_the_name_of_a_table_is_refused(reader: LakeReader, name: str) -> None:
    with raising(ConfigurationError, reason="table_name", subject=name):
        reader.table(name)


def test_a_table_that_is_missing_is_named_with_one_like_it(
    reader: LakeReader, prices: str, namespace: str
) -> None:
    missing = f"{namespace}.pricez"
    with raising(TableNotThere, prices, subject=missing):
        reader.table(missing)
    with pytest.raises(NoSuchTableError):
        reader.polars(missing)


def test_a_query_may_write_a_table_in_several_cases(
    lakehouse: Lakehouse, reader: LakeReader, prices: str, namespace: str
) -> None:
    upper = prices.upper()
    assert count(reader, f"{prices} a JOIN {upper} b USING (item) JOIN {prices} c USING (item)") == 2
    catalog = lakehouse.catalog()
    catalog.create_table((namespace, "Prices"), pa.schema([("item", pa.string())]))
    assert count(reader, f'{namespace}."Prices"') == 0
    assert count(reader, prices) == 2
    with raising(QueryFailed, reason="names_differ_in_case"):
        count(reader, f'{prices} JOIN {namespace}."Prices" USING (item)')


def test_arrow_polars_and_duckdb(reader: LakeReader, prices: str) -> None:
    with reader.sql(f"SELECT item, eur FROM {prices} ORDER BY item") as result:
        assert result.arrow().to_pydict() == {"item": ["bolt", "nut"], "eur": [0.2, 0.1]}
        assert result.polars().equals(pl.DataFrame({"item": ["bolt", "nut"], "eur": [0.2, 0.1]}))
        assert result.relation().filter("eur < 0.15").fetchall() == [("nut", 0.1)]
        with result.batches(1) as batches:
            assert [batch.num_rows for batch in batches] == [1, 1]
    lazily = reader.polars(prices).filter(pl.col("eur") > 0.15).select("item")
    assert lazily.collect(engine="streaming").to_dicts() == [{"item": "bolt"}]


@pytest.mark.nessie
def test_what_the_command_prints(lakehouse: Lakehouse, prices: str, tmp_path: Path) -> None:
    query = f"FROM {prices} ORDER BY item"
    shown = call(lakehouse, query)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0].split() == ["item", "┃", "eur", "┃", "tags"]
    assert shown.stdout.splitlines()[3].split("│")[2].strip() == "NULL"
    assert shown.stderr.startswith("2 ")
    assert "main" in shown.stderr
    assert "--rows 0" in call(lakehouse, query, "--rows", "1").stderr
    csv = call(lakehouse, query, "--format", "csv").stdout
    assert csv == '"item","eur","tags"\n"bolt",0.2,"[a]"\n"nut",0.1,\n'
    stream = call(lakehouse, query, "--format", "arrow").stdout_bytes
    assert pa.ipc.open_stream(io.BytesIO(stream)).read_all().num_rows == 2
    file = tmp_path / "prices.arrow"
    assert call(lakehouse, query, "--format", "arrow", "--output", str(file)).stdout == ""
    assert pa.ipc.open_file(file).read_all()["item"].to_pylist() == ["bolt", "nut"]
    assert prices in call(lakehouse).stdout.splitlines()
    failed = call(lakehouse, f"SELECT item::int FROM {prices}")
    assert (failed.exit_code, "Conversion Error" in failed.output) == (1, True)
    assert prices in call(lakehouse, "FROM prices").output


@pytest.mark.spark
def test_rows_that_spark_deleted_are_gone(lakehouse: Lakehouse, reader: LakeReader, prices: str) -> None:
    session = lakehouse.spark_session()
    try:
        session.sql(f"ALTER TABLE nessie.{prices} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
        session.sql(f"DELETE FROM nessie.{prices} WHERE item = 'bolt'")
    finally:
        session.stop()
    assert any(task.delete_files for task in reader.table(prices).scan().plan_files())
    assert count(reader, prices) == 1
    assert count(reader, f"{prices} WHERE item = 'bolt'") == 0


# -- a lake that does not run --------------------------------------------------------------------------


def test_a_folder_without_a_lake_stays_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "state"
    with raising(LakeNotRunning, "BRANCHLAKE_STATE_DIR", reason="no_lake", subject=str(root)):
        connect(Settings(state_dir=root))
    done = CliRunner().invoke(main, ["sql", "SELECT 1"], env={"BRANCHLAKE_STATE_DIR": str(root)})
    assert (done.exit_code, str(root) in done.output) == (1, True)
    assert not root.exists()


def test_a_lake_that_is_down_says_how_to_start_it(tmp_path: Path) -> None:
    (tmp_path / "nessie").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nessie.json").write_text(
        json.dumps({"name": "nessie", "pid": 1, "started_ticks": -1, "port": 1})
    )
    with raising(LakeNotRunning, f"BRANCHLAKE_STATE_DIR={tmp_path} branchlake up", reason="stopped"):
        connect(Settings(state_dir=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nessie", "run"]
