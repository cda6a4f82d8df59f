"""What an upgrade of a library moves, named one by one, before anything else fails because of it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from pyiceberg.table.update import snapshot

from branchlake_dagster.internals import dagster as dagster_internals
from branchlake_dagster.internals import dagster_launching as launching_internals
from branchlake_dagster.internals import pandera as pandera_internals
from branchlake_dagster.internals import pyiceberg as pyiceberg_internals
from branchlake_dagster_tests.suite.raised import raising

ROOT = Path(__file__).parents[2]
ONE = ROOT / "branchlake_dagster" / "internals"

USED = [
    ("dagster", "DefaultRunLauncher.launch_run", "context"),
    ("dagster", "DefaultRunLauncher.terminate", "run_id"),
    ("dagster", "DagsterInstance.code_server_process_startup_timeout", ""),
    ("dagster._api.get_server_id", "sync_get_server_id", "api_client"),
    (
        "dagster._cli.api",
        "_execute_run_command_body",
        "run_id instance write_stream_fn set_exit_code_on_failure",
    ),
    (
        "dagster._config.pythonic_config.resource",
        "ConfigurableResourceFactory._with_updated_values",
        "values",
    ),
    (
        "dagster._core.asset_graph_view.asset_graph_view",
        "AssetGraphView",
        "temporal_context instance asset_graph",
    ),
    ("dagster._core.asset_graph_view.entity_subset", "EntitySubset", ""),
    (
        "dagster._core.asset_graph_view.entity_subset",
        "EntitySubset.compute_mapped_subset",
        "to_key direction",
    ),
    (
        "dagster._core.asset_graph_view.entity_subset",
        "EntitySubset.expensively_compute_asset_partitions",
        "",
    ),
    ("dagster._core.definitions.temporal_context", "TemporalContext", "effective_dt last_event_id"),
    ("dagster._core.execution.context.system", "PlanExecutionContext.repository_def", ""),
    ("dagster._core.asset_graph_view.timing_metadata", "TimingMetadata", ""),
    ("dagster._core.definitions.assets.graph.base_asset_graph", "BaseAssetGraph", ""),
    ("dagster._core.definitions.events", "AssetKeyPartitionKey", "asset_key partition_key"),
    ("dagster._core.definitions.reconstruct", "ReconstructableJob", "repository"),
    (
        "dagster._core.definitions.reconstruct",
        "ReconstructableRepository.with_repository_load_data",
        "metadata",
    ),
    ("dagster._core.definitions.repository_definition", "RepositoryDefinition.load_all_definitions", ""),
    ("dagster._core.definitions.repository_definition", "RepositoryLoadData", ""),
    ("dagster._core.events", "EngineEventData", "metadata"),
    ("dagster._core.events", "StepMaterializationData", "materialization"),
    ("dagster._core.events", "AssetMaterializationPlannedData", "asset_key partition"),
    (
        "dagster",
        "DagsterEvent.build_asset_materialization_planned_event",
        "job_name step_key asset_materialization_planned_data",
    ),
    ("dagster._core.execution.backfill", "PartitionBackfill.get_asset_backfill_data", "asset_graph"),
    ("dagster._core.execution.context.compute", "enter_execution_context", "step_context"),
    ("dagster._core.execution.plan.execute_step", "enter_execution_context", "step_context"),
    ("dagster._core.execution.backfill", "PartitionBackfill.with_status", "status"),
    (
        "dagster._core.execution.backfill",
        "PartitionBackfill.with_asset_backfill_data",
        "asset_backfill_data dynamic_partitions_store asset_graph",
    ),
    ("dagster._core.execution.backfill", "BulkActionsFilter", ""),
    ("dagster._core.execution.context.compute", "current_execution_context", ""),
    ("dagster._core.instance", "InstanceRef.secrets_loader", ""),
    (
        "dagster._core.instance.runs.run_domain",
        "RunDomain.get_keys_to_reexecute",
        "run_id execution_plan_snapshot",
    ),
    ("dagster", "AssetsDefinition.node_keys_by_output_name", ""),
    ("dagster._core.launcher.base", "CheckRunHealthResult", "status msg run_worker_id"),
    ("dagster._core.launcher.base", "LaunchRunContext", "dagster_run workspace"),
    ("dagster._core.origin", "RepositoryPythonOrigin", "executable_path code_pointer"),
    ("dagster._core.remote_origin", "GrpcServerCodeLocationOrigin", "socket additional_metadata"),
    ("dagster._core.remote_origin", "ManagedGrpcPythonEnvCodeLocationOrigin", ""),
    ("dagster._core.remote_representation.code_location", "GrpcServerCodeLocation.origin", ""),
    ("dagster._core.scheduler.instigation", "InstigatorStatus", ""),
    ("dagster._core.scheduler.instigation", "SensorInstigatorData", "last_tick_timestamp"),
    ("dagster", "DagsterInstance.all_instigator_state", "instigator_type"),
    ("dagster._core.secrets.loader", "SecretsLoader.get_secrets_for_environment", "location_name"),
    ("dagster._utils", "get_run_crash_explanation", "prefix exit_code"),
    ("dagster._utils.env", "using_dagster_dev", ""),
    ("dagster._utils.hosted_user_process", "recon_repository_from_origin", "origin"),
    ("dagster._utils.interrupts", "capture_interrupts", ""),
    ("pyiceberg.avro.decoder", "new_decoder", "b"),
    ("pyiceberg.avro.file", "META_SCHEMA", ""),
    ("pyiceberg.avro.file", "SYNC_SIZE", ""),
    ("pyiceberg.avro.file", "AvroFileHeader.compression_codec", ""),
    ("pyiceberg.avro.resolver", "construct_reader", "file_schema read_types"),
    ("pyiceberg.avro.resolver", "resolve_reader", "file_schema read_schema read_types read_enums"),
    ("pyiceberg.catalog", "MetastoreCatalog._convert_schema_if_needed", "schema format_version"),
    ("pyiceberg.catalog", "MetastoreCatalog._parse_metadata_version", "metadata_location"),
    ("pyiceberg.catalog", "MetastoreCatalog._write_metadata", "metadata io metadata_path"),
    (
        "pyiceberg.expressions.visitors",
        "_InclusiveMetricsEvaluator",
        "schema expr case_sensitive include_empty_files",
    ),
    (
        "pyiceberg.expressions.visitors",
        "_StrictMetricsEvaluator",
        "schema expr case_sensitive include_empty_files",
    ),
    (
        "pyiceberg.expressions.visitors",
        "_ManifestEvalVisitor",
        "partition_struct_schema partition_filter case_sensitive",
    ),
    ("pyiceberg.expressions.visitors", "extract_field_ids", "expr"),
    ("pyiceberg.io.pyarrow", "_ConvertToArrowExpression._get_field_name", "term"),
    ("pyiceberg.io.pyarrow", "_dataframe_to_data_files", "table_metadata df io write_uuid counter"),
    (
        "pyiceberg.io.pyarrow",
        "data_file_statistics_from_parquet_metadata",
        "parquet_metadata stats_columns parquet_column_mapping",
    ),
    ("pyiceberg.io.pyarrow", "truncate_upper_bound_text_string", "value trunc_length"),
    ("pyiceberg.io.pyarrow", "write_file", "io table_metadata tasks"),
    ("pyiceberg.manifest", "MANIFEST_ENTRY_SCHEMAS", ""),
    ("pyiceberg.manifest", "_inherit_from_manifest", "entry manifest"),
    ("pyiceberg.table", "Transaction._apply", "updates requirements"),
    ("pyiceberg.table", "Transaction.table_metadata", ""),
    ("pyiceberg.table", "CreateTableTransaction.commit_transaction", ""),
    ("pyiceberg.table.update", "_apply_table_update", "update base_metadata context"),
    ("pyiceberg.table.update", "_TableMetadataUpdateContext", ""),
    (
        "pyiceberg.table.update",
        "_update_table_metadata_log",
        "base_metadata metadata_location last_updated_ms",
    ),
    ("pyiceberg.table.update.snapshot", "ExecutorFactory.get_or_create", ""),
    (
        "pyiceberg.table.update.snapshot",
        "manifest_evaluator",
        "partition_spec schema partition_filter case_sensitive",
    ),
    ("pyiceberg.table.update.snapshot", "_FastAppendFiles", "operation transaction io snapshot_properties"),
    ("pyiceberg.table.update.snapshot", "_OverwriteFiles._commit", ""),
    ("pyiceberg.table.update.snapshot", "_OverwriteFiles.delete_data_file", "data_file"),
    ("pyspark.sql.connect.client", "SparkConnectClient._handle_error", "error"),
    ("pyspark.sql.connect.client", "SparkConnectClient", "session_hooks"),
    ("pyspark.sql.connect.client", "SparkConnectClient.set_retry_policies", "policies"),
    ("pyspark.sql.connect.client", "SparkConnectClient.config", "operation"),
    (
        "pyspark.sql.connect.client.retries",
        "DefaultPolicy",
        "max_retries initial_backoff backoff_multiplier max_backoff",
    ),
    ("pyspark.sql.connect.conf", "RuntimeConf._set_all", "configs silent"),
    ("pyspark.sql.connect.client", "SparkConnectClient.execute_command", "command"),
    ("pyspark.sql.connect.dataframe", "DataFrame", "plan session"),
    ("pyspark.sql.connect.plan", "CachedRemoteRelation", "relation_id spark_session"),
    ("pyspark.sql.connect.proto", "ConfigRequest", ""),
]
"""Module, name in it, and the parameters that we give it."""


@pytest.mark.parametrize(("module", "name", "parameters"), USED, ids=lambda one: str(one))
def test_what_is_used_is_where_it_was(module: str, name: str, parameters: str) -> None:
    found: object = import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
        assert found is not None, f"{module}.{name} has moved; {ONE.name} uses it"
    if parameters:
        assert isinstance(found, Callable)
        missing = set(parameters.split()) - set(inspect.signature(found).parameters)
        assert not missing, f"{module}.{name} takes no {missing} any more"


def test_the_tags_of_retries_are_what_runs_carry() -> None:
    """They stand in Dagster's database of every user, so they cannot change without a migration."""
    assert dagster_internals.PARENT_RUN_ID_TAG == "dagster/parent_run_id"
    assert dagster_internals.ROOT_RUN_ID_TAG == "dagster/root_run_id"
    assert dagster_internals.ASSET_RESUME_RETRY_TAG == "dagster/is_asset_resume_retry"


def test_pandera_distinguishes_its_own_checks_from_others() -> None:
    from pandera.api.checks import Check

    assert pandera_internals.get_builtin_check(Check.ge(3)) == ("greater_than_or_equal_to", {"min_value": 3})
    own = Check(lambda _: True)
    assert pandera_internals.get_builtin_check(own) is None
    assert pandera_internals.find_check_method(own) is None


def test_what_a_run_imports_late_is_where_it_was() -> None:
    for module in launching_internals._LATE_IMPORTS:
        import_module(module)


def test_nothing_else_names_a_private_module() -> None:
    private = ("dagster" + "._", "import _Fast", "import _Overwrite")
    allowed = {
        ONE / "dagster.py",
        ONE / "dagster_launching.py",
        ONE / "dagster_sqlite.py",
        ONE / "pyiceberg.py",
        ROOT / "branchlake_dagster_tests/dagster_internals.py",
    }
    allowed |= {Path(__file__), ROOT / "branchlake_dagster_tests/publication/rebase/deleting.py"}
    sources = [
        *(ROOT / "branchlake_dagster").rglob("*.py"),
        *(ROOT / "branchlake_dagster_tests").rglob("*.py"),
    ]
    naming = [path for path in sources if any(name in path.read_text() for name in private)]
    assert set(naming) - allowed == set()


def test_nothing_is_written_any_more_once_writing_has_failed() -> None:
    goes_on, late = threading.Event(), []

    def slow() -> None:
        goes_on.wait(30)
        late.append("written")

    def fail() -> None:
        with pyiceberg_internals._wait_for_tasks():
            snapshot.ExecutorFactory.get_or_create().submit(slow)
            threading.Timer(0.05, goes_on.set).start()
            raise OSError("full")

    with raising(OSError, "full"):
        fail()
    assert late == ["written"]
