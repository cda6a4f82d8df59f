"""Runs assets and the reconciler in the test's process, as Dagster's daemon does."""

from __future__ import annotations

import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import dagster as dg

from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.internals.dagster import (
    ASSET_RESUME_RETRY_TAG,
    PARENT_RUN_ID_TAG,
    ROOT_RUN_ID_TAG,
    load_failed_keys,
)
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.publication.ledger import Publication, iter_publications
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.dagster_internals import (
    InMemoryJob,
    KnownExecutionState,
    create_execution_plan,
    execute_run,
    snapshot_from_execution_plan,
)
from branchlake_dagster_tests.simulation.history import Pointer
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.suite.instances import new_instance


@dataclass
class Project:
    """A code location with the given assets and checks, and its own Dagster instance."""

    lake: Lakehouse
    instance: dg.DagsterInstance
    definitions: dg.Definitions

    def run(
        self, *assets: dg.AssetKey | str, partition: str | None = None, ok: bool = True, **options: Any
    ) -> str:
        """Materialize in this process and return the run id."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        selection = [dg.AssetKey.from_coercible(a) if isinstance(a, str) else a for a in assets] or None
        result = job.execute_in_process(
            instance=self.instance,
            asset_selection=selection,
            partition_key=partition,
            raise_on_error=False,
            **options,
        )
        assert result.success is ok, [e.message for e in result.all_events if e.is_failure]
        self.last = result
        return result.run_id

    def failed_with(self, kind: type[BranchlakeError], *texts: str) -> None:
        """Require that the only failed step of the last run failed with this class of error, with `texts` in its message."""
        (failure,) = [e for e in self.last.all_events if e.is_step_failure]
        error = failure.step_failure_data.error
        assert error is not None
        while error.cause and (error.cls_name or "").startswith("Dagster"):
            error = error.cause
        assert error.cls_name == kind.__name__, error.message
        for text in texts:
            assert text in error.message

    @property
    def graph(self) -> Any:
        return self.definitions.get_repository_def().asset_graph

    def reconciler(self, **options: Any) -> Reconciler:
        return Reconciler.from_lake(self.lake, self.instance, self.graph, **options)

    def settle(self, run_id: str) -> Outcome:
        """Publish or discard the branch of a run, as the publication sensor does."""
        outcome = self.reconciler().reconcile_run(run_id)
        assert outcome is not None
        return outcome

    def rows(self, *identifier: str, ref: str = MAIN) -> list[dict[str, Any]]:
        table = self.lake.catalog(ref).load_table(identifier)
        return list(table.scan().to_arrow().to_pylist())

    def branches(self) -> set[str]:
        return {ref.name for ref in self.lake.nessie.references()}

    def observations(self, key: Sequence[str]) -> list[dg.AssetObservation]:
        records = self.instance.fetch_observations(dg.AssetKey(list(key)), limit=100).records
        return [record.asset_observation for record in records if record.asset_observation]


def retry(
    p: Project, parent_id: str, *steps: str, ok: bool = True, assets: Collection[dg.AssetKey] = ()
) -> str:
    """Retry a run from failure, or only the given steps, as the UI does, and return the run id.

    `assets` are the assets of the run; empty means all.
    """
    parent = p.instance.get_run_by_id(parent_id)
    assert parent is not None
    job = p.definitions.resolve_implicit_global_asset_job_def()
    if assets:
        job = job.get_subset(asset_selection={*assets})
    if steps:
        known = KnownExecutionState.build_for_reexecution(p.instance, parent)
        keys: Any = list(steps)
        known = known.update_for_step_selection(keys)
    else:
        keys, known = KnownExecutionState.build_resume_retry_reexecution(p.instance, parent)
    plan = create_execution_plan(
        job, step_keys_to_execute=keys, known_state=known, instance_ref=p.instance.get_ref()
    )
    root = parent.root_run_id or parent.run_id
    run = p.instance.create_run_for_job(
        job,
        execution_plan=plan,
        parent_run_id=parent_id,
        root_run_id=root,
        tags={**parent.tags, PARENT_RUN_ID_TAG: parent_id, ROOT_RUN_ID_TAG: root},
    )
    return _execute(p, job, run, ok=ok)


def _execute(p: Project, job: dg.JobDefinition, run: dg.DagsterRun, *, ok: bool) -> str:
    """Execute a run that exists, in this process; the run id."""
    p.last = execute_run(InMemoryJob(job), run, p.instance)
    assert p.last.success is ok, [e.message for e in p.last.all_events if e.is_failure]
    return run.run_id


def retry_failed_assets(p: Project, parent_id: str, *, ok: bool = True) -> str:
    """Retry from the failed assets, as the UI does; the run id."""
    parent = p.instance.get_run_by_id(parent_id)
    assert parent is not None
    failed = load_failed_keys(p.instance, parent)
    assert failed is not None
    job = p.definitions.resolve_implicit_global_asset_job_def()
    job = job.get_subset(asset_selection=failed[0], asset_check_selection=failed[1])
    return _re_execute(p, job, parent, ok=ok, **{ASSET_RESUME_RETRY_TAG: "true"})


def re_execute_all(p: Project, parent_id: str, *, ok: bool = True) -> str:
    """Re-execute all steps of a run, as the UI does; the run id."""
    parent = p.instance.get_run_by_id(parent_id)
    assert parent is not None
    job = p.definitions.resolve_implicit_global_asset_job_def()
    if parent.asset_selection:
        job = job.get_subset(asset_selection=parent.asset_selection)
    return _re_execute(p, job, parent, ok=ok)


def _re_execute(p: Project, job: dg.JobDefinition, parent: dg.DagsterRun, *, ok: bool, **tags: str) -> str:
    """Re-execute a job without step keys, as the web server creates the run."""
    root = parent.root_run_id or parent.run_id
    plan = create_execution_plan(job, instance_ref=p.instance.get_ref())
    run = p.instance.create_run(
        job_name=job.name,
        run_id=None,
        run_config={},
        status=None,
        tags={**parent.tags, PARENT_RUN_ID_TAG: parent.run_id, ROOT_RUN_ID_TAG: root, **tags},
        root_run_id=root,
        parent_run_id=parent.run_id,
        step_keys_to_execute=None,
        execution_plan_snapshot=snapshot_from_execution_plan(plan, job.get_job_snapshot_id()),
        job_snapshot=job.get_job_snapshot(),
        parent_job_snapshot=job.get_parent_job_snapshot(),
        asset_selection=job.asset_selection,
        asset_check_selection=job.asset_check_selection,
        resolved_op_selection=None,
        op_selection=None,
        remote_job_origin=None,
        job_code_origin=None,
        asset_graph=job.asset_layer.asset_graph,
    )
    return _execute(p, job, run, ok=ok)


def assign_main(lake: Lakehouse, to: str) -> None:
    """Move `main` to a hash, as Nessie's `ASSIGN BRANCH` does. The product's client cannot do this."""
    if isinstance(lake.nessie._transport, DirectTransport):
        lake.nessie._transport.server.history.references[MAIN] = Pointer("BRANCH", to)
        return
    head = lake.nessie.reference(MAIN).hash
    request = urllib.request.Request(
        f"{lake.nessie.uri}/trees/{MAIN}@{head}?type=BRANCH",
        data=f'{{"type": "BRANCH", "name": "main", "hash": "{to}"}}'.encode(),
        headers={"Content-Type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(request) as response:
        assert response.status == 200


def published(client: NessieClient, branches: Iterable[str]) -> dict[str, Publication]:
    """Return the publications of these branches in the ledger."""
    names = set(branches)
    return {one.branch: one for one in iter_publications(client) if one.branch in names}


@contextmanager
def project(
    lake: Lakehouse,
    *parts: Any,
    instance: dg.DagsterInstance | None = None,
    resources: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Project]:
    """Open a project of assets and asset checks. Without `instance` it gets a new one with Dagster's default storage."""
    assets = [p for p in parts if not isinstance(p, dg.AssetChecksDefinition)]
    checks = [p for p in parts if isinstance(p, dg.AssetChecksDefinition)]
    # Secrets are omitted: each run reads them from the environment, which tests change between runs.
    resource = LakehouseResource.from_settings(
        lake.settings.model_copy(update=dict.fromkeys(Settings.secret_names()))
    )
    machinery = branchlake_definitions(lake.settings, lakehouse=resource)
    merged = dg.Definitions.merge(
        machinery,
        dg.Definitions(
            assets=assets, asset_checks=checks, executor=dg.in_process_executor, resources=dict(resources)
        ),
    )
    with nullcontext(instance) if instance else new_instance() as its_instance:
        yield Project(lake, its_instance, merged)
