"""The pipeline of the backfill tests, with two days computed and published."""

from collections.abc import Iterator

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline, follow


@pytest.fixture
def pipeline(namespace: str) -> Pipeline:
    return Pipeline(namespace)


@pytest.fixture
def p(lakehouse: Lakehouse, pipeline: Pipeline) -> Iterator[Project]:
    with project(lakehouse, *pipeline.assets) as made:
        for day in ("2026-08-01", "2026-08-02"):
            made.settle(made.run(pipeline.events.key, partition=day))
        follow(made)
        yield made
