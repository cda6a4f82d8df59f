"""The names under which data is stored: those in a lake and its Dagster home, and those in the code."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import IcebergTable, Namespace
from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster_tests.baseline import shop
from branchlake_dagster_tests.baseline.opened import Opened
from branchlake_dagster_tests.baseline.storage import objects
from branchlake_dagster_tests.suite.source_statements import statements

_OPEN_ENDED = (
    *("branchlake.consumed.", "branchlake.offsets.", "branchlake.tables.", "branchlake.reprocessed."),
    "branchlake.kept_since.",
)
"""Behind these is the name of a partition or an ingestion."""
_ALERT = ".dagster/branchlake_alert_"
_OURS = re.compile(r"branchlake$|branchlake[./]|\.dagster/branchlake_")
_NAME = re.compile(
    r"(branchlake[./]|\.dagster/branchlake_|_branchlake/)[a-z_./]+|branchlake|branchlake\.[a-z]+\."
)
CODE = Path(__file__).parents[2] / "branchlake_dagster"


def stored_names(p: Opened, endpoint: str) -> dict[str, list[str]]:
    """By kind, the sorted names of everything of ours in a lake and its Dagster home. Reads all of it.

    Metadata of definitions counts as stored: it is in users' code, and Dagster keeps what it saw of it.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    lake = p.lake
    _of_definitions(p.definitions, found)
    _of_references(lake, found)
    for name, content in objects(endpoint).items():
        if not content:
            continue  # how PyArrow marks a folder
        if (at := name.find("_branchlake/")) >= 0:
            found["folder"].add(name[at:].rsplit("/", 2 if "heartbeats" in name else 1)[0])
        if "/_branchlake/heartbeats/" in name:
            found["heartbeat"] |= json.loads(content).keys()
    folder = Landing(lake.settings.landing_folder)
    for file in folder.files(shop.TOPIC, 0):
        table = pq.read_table(file.path, partitioning=None)
        found["landing column"] |= {*table.column_names}
        found["header"] |= {one["key"] for row in table["headers"].to_pylist() for one in row}
    _of_dagster(p.instance, found)
    return {kind: sorted(map(_closed, names)) for kind, names in sorted(found.items())}


def _closed(name: str) -> str:
    for prefix in (*_OPEN_ENDED, _ALERT):
        if name.startswith(prefix):
            return prefix
    return name


def _ours(names: Iterable[str]) -> set[str]:
    return {_closed(name) for name in names if _OURS.match(name)}


def _of_definitions(definitions: dg.Definitions, found: defaultdict[str, set[str]]) -> None:
    repository = definitions.get_repository_def()
    for node in repository.asset_graph.asset_nodes:
        found["asset metadata"] |= _ours(node.metadata)
    for checks in repository.asset_checks_defs_by_key.values():
        for spec in checks.check_specs:
            found["check metadata"] |= _ours(spec.metadata)
    for sensor in repository.sensor_defs:
        found["sensor metadata"] |= _ours(sensor.metadata or {})
    found["job name"] |= {job.name for job in repository.get_all_jobs()}
    found["sensor name"] |= {sensor.name for sensor in repository.sensor_defs}
    found["schedule name"] |= {schedule.name for schedule in repository.schedule_defs}
    found["resource"] |= {*(definitions.resources or {})}


def _of_references(lake: Lakehouse, found: defaultdict[str, set[str]]) -> None:
    commits, tables = set[str](), set[str]()
    for ref in lake.nessie.references():
        kind = "tag" if str(ref.type) == "TAG" else "branch"
        if "-" in ref.name:
            found[f"{kind} prefix"].add(ref.name.partition("-")[0] + "-")
        for entry in lake.nessie.log(ref.name):
            if entry.commit.hash in commits:
                break
            commits.add(str(entry.commit.hash))
            found["commit property"] |= _ours(entry.commit.properties)
        for one in lake.nessie.entries(ref.name, fetch_content=True):
            if isinstance(one.content, Namespace) and one.key.elements[0] == "branchlake":
                found["namespace"].add(re.sub(r"(?<=lease-).*", "", one.key.name))
                found["namespace property"] |= _ours(one.content.properties)
            if not isinstance(one.content, IcebergTable) or one.content.metadata_location in tables:
                continue
            tables.add(one.content.metadata_location)
            table = lake.catalog(ref.name).load_table(tuple(one.key.elements))
            found["table property"] |= _ours(table.properties)
            for snapshot in table.metadata.snapshots:
                if snapshot.summary:
                    found["snapshot summary"] |= _ours(snapshot.summary.additional_properties)
            if one.key.elements[-1].endswith("_dead_letters"):
                found["dead letter column"] |= {*table.schema().column_names}


def _of_dagster(instance: dg.DagsterInstance, found: defaultdict[str, set[str]]) -> None:
    for run in instance.get_runs():
        found["run tag"] |= _ours(run.tags)
        for event in instance.all_logs(run.run_id):
            found["event metadata"] |= _ours(_labels(event.dagster_event))
        found["status"].add(run.tags.get("branchlake", "none"))
    for key in instance.all_asset_keys():
        for record in instance.fetch_observations(key, limit=1_000).records:
            if record.asset_observation:
                found["event metadata"] |= _ours(record.asset_observation.metadata)
    for backfill in instance.get_backfills():
        found["backfill tag"] |= _ours(backfill.tags)
    for state in instance.all_instigator_state():
        found["sensor state"].add(state.instigator_name)


def names_of_run(p: Opened, run_id: str, table: str) -> dict[str, list[str]]:
    """By kind, the names that a published run of one asset of the shop has left on `main` and in Dagster."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    found["run tag"] = _ours(run.tags)
    for event in p.instance.all_logs(run_id):
        found["event metadata"] |= _ours(_labels(event.dagster_event))
    for entry in p.lake.nessie.log(MAIN):
        if entry.commit.properties.get("branchlake.run_id") == run_id:
            found["commit property"] = _ours(entry.commit.properties)
            break
    for snapshot in p.lake.catalog(MAIN).load_table(("shop", table)).metadata.snapshots:
        summary = snapshot.summary.additional_properties if snapshot.summary else {}
        if summary.get("branchlake.run_id") == run_id:
            found["snapshot summary"] |= _ours(summary)
    assert found["commit property"]
    assert found["snapshot summary"]
    return {kind: sorted(names) for kind, names in sorted(found.items())}


def _labels(event: Any) -> Iterator[str]:
    """The names in an event's metadata, whatever the event is."""
    if event is None or event.event_specific_data is None:
        return
    data = event.event_specific_data
    for holder in (data, *(getattr(data, name, None) for name in ("materialization", "asset_observation"))):
        metadata = getattr(holder, "metadata", None)
        if isinstance(metadata, Mapping):
            yield from metadata


def classes_in_home(home: Path) -> set[str]:
    """The names of all classes that Dagster's databases hold objects of."""
    found = set()
    for path in home.rglob("*.db"):
        connection = sqlite3.connect(path)
        try:
            text = "\n".join(connection.iterdump())
        finally:
            connection.close()
        found |= {*re.findall(r'"__class__": "(\w+)"', text)}
    return found


# -- the code ------------------------------------------------------------------------------------------


def names_in_code(root: Path = CODE) -> dict[str, set[str]]:
    """Each name in the code that looks like a stored one, with the modules in which it is written.

    A name that is put together of constants, also of those of other modules, counts as what it becomes. What
    follows in braces and is not constant is left out: `f"{PREFIX}offsets.{name}"` counts as
    `branchlake.offsets.`.
    """
    modules = {_module(path, root): ast.parse(path.read_text()) for path in root.rglob("*.py")}
    constants = _Constants(modules)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in modules.items():
        for node in _outermost_texts(tree):
            text = constants.text(module, node)
            if text is not None and _NAME.fullmatch(text):
                found[text].add(module)
            if isinstance(node, ast.JoinedStr):  # a folder below a root that is not constant
                for part in node.values:
                    later = constants.text(module, part) or ""
                    if (at := later.find("/_branchlake/")) >= 0:
                        found[later[at + 1 :].rstrip("/")].add(module)
    return dict(found)


def _outermost_texts(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions that may be texts, without those that are a part of one."""
    pending = [tree]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            if isinstance(child, ast.Constant | ast.JoinedStr | ast.BinOp):
                yield child
            elif not isinstance(child, ast.Name | ast.expr_context):
                pending.append(child)


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Constants:
    """The texts of expressions of constants, over all modules."""

    def __init__(self, modules: Mapping[str, ast.Module]) -> None:
        self._assigned: dict[tuple[str, str], ast.expr] = {}
        self._imported: dict[tuple[str, str], tuple[str, str]] = {}
        for module, tree in modules.items():
            for node in statements(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        self._imported[module, alias.asname or alias.name] = (node.module, alias.name)
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._assigned[module, node.targets[0].id] = node.value

    def text(self, module: str, node: ast.expr) -> str | None:
        """None if the beginning is not constant."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.FormattedValue):
            return self.text(module, node.value)
        if isinstance(node, ast.Name):
            place = (module, node.id)
            while place in self._imported and place not in self._assigned:
                place = self._imported[place]
            return self.text(place[0], self._assigned[place]) if place in self._assigned else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported = self._imported.get((module, node.value.id))
            home = f"{imported[0]}.{imported[1]}" if imported else node.value.id
            assigned = self._assigned.get((home, node.attr))
            return self.text(home, assigned) if assigned is not None else None
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
                return None
            parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
            found = ""
            for number, part in enumerate(parts):
                text = self.text(module, part)
                if text is None:
                    return found if number else None
                found += text
            return found
        return None
