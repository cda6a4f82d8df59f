"""The pipeline of the backfill tests, with two days computed and published.

It is published once for all tests of a module that run in memory. Each of them begins with the references of that
time, and with a copy of that Dagster instance.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow
from branchlake_dagster_tests.simulation.history import Pointer
from branchlake_dagster_tests.suite import memory, tiers
from branchlake_dagster_tests.suite.instances import new_instance


@dataclass(frozen=True)
class PublishedPipeline:
    """What the tests of a module begin with."""

    namespace: str
    lake: Lakehouse
    server: memory.SharedNessie
    references: dict[str, Pointer]
    instance: Path


def publish(made: Project, pipeline: Pipeline) -> None:
    for day in ("2026-08-01", "2026-08-02"):
        made.settle(made.run(pipeline.events.key, partition=day))
    follow(made)


@pytest.fixture(scope="module")
def published_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublishedPipeline]:
    folder, server = tmp_path_factory.mktemp("pipeline"), memory.SharedNessie()
    pipeline = Pipeline(namespace := f"t{uuid.uuid4().hex[:12]}")
    with memory.serve(server) as client:
        lake = memory.open_lake(client, folder / "state")
        with new_instance() as instance:
            with project(lake, *pipeline.assets, instance=instance) as made:
                publish(made, pipeline)
            shutil.copytree(instance.root_directory, folder / "instance")
        references = deepcopy(server.history.references)
        yield PublishedPipeline(namespace, lake, server, references, folder / "instance")


@pytest.fixture
def pipeline(namespace: str) -> Pipeline:
    return Pipeline(namespace)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """In memory that of the published pipeline: the lakes of other tests are not the same."""
    if "p" in request.fixturenames and tiers.tier_of(request.node) == tiers.IN_MEMORY:
        found: PublishedPipeline = request.getfixturevalue("published_pipeline")
        return found.namespace
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def p(request: pytest.FixtureRequest, lakehouse: Lakehouse, pipeline: Pipeline) -> Iterator[Project]:
    if tiers.tier_of(request.node) != tiers.IN_MEMORY:
        with project(lakehouse, *pipeline.assets) as made:
            publish(made, pipeline)
            yield made
        return
    found: PublishedPipeline = request.getfixturevalue("published_pipeline")
    found.server.history.references = deepcopy(found.references)
    with (
        new_instance(found.instance) as instance,
        project(found.lake, *pipeline.assets, instance=instance) as made,
    ):
        yield made
