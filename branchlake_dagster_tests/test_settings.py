from collections.abc import Callable
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from branchlake_dagster import BranchSparkResource, LakehouseResource, branchlake_definitions
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import connect_url
from branchlake_dagster_tests.suite.raised import raising


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("True", True), ("/etc/ca.pem", "/etc/ca.pem")]
)
def test_tls_verification_is_a_switch_or_a_bundle(
    monkeypatch: pytest.MonkeyPatch, text: str, value: object
) -> None:
    monkeypatch.setenv("BRANCHLAKE_NESSIE_VERIFY_TLS", text)
    assert Settings().nessie_verify_tls == value


def test_java_options_are_shell_words() -> None:
    assert Settings(spark_java_options="-Xss8m '-Da=b c'").spark_java_options
    with pytest.raises(ValidationError) as raised:
        Settings(spark_java_options="'-Da=b c")
    assert [error["loc"] for error in raised.value.errors()] == [("spark_java_options",)]


def test_the_reaper_runs_at_even_distances() -> None:
    with raising(ValidationError, "reap_interval_min", 45):
        Settings(reap_interval_min=45)


@pytest.mark.parametrize("hours", [0, -1])
def test_a_discarded_branch_keeps_its_files_for_some_time(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A retry from failure, and a run that turns out to have passed, go on from it."""
    with pytest.raises(ValidationError) as raised:
        Settings(discard_grace_h=hours)
    assert [error["loc"] for error in raised.value.errors()] == [("discard_grace_h",)]
    monkeypatch.setenv("BRANCHLAKE_DISCARD_GRACE_H", str(hours))
    with pytest.raises(ValidationError):
        Settings()
    with pytest.raises(ValidationError):
        _ = LakehouseResource(discard_grace_h=hours).lakehouse.settings


def test_an_undo_needs_the_history_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"history_horizon_days": 3, "orphan_file_grace_h": 72}
    assert Settings(**short).undo_days == 7  # not set: the policy uses the horizon
    with pytest.raises(ValidationError):
        Settings(**short, undo_days=4)
    assert LakehouseResource(**short).lakehouse.settings.history_horizon_days == 3
    assert Settings(undo_days=31).history_horizon == timedelta(days=31)  # its default grows
    monkeypatch.setenv("BRANCHLAKE_UNDO_DAYS", "31")
    with pytest.raises(ValidationError):
        Settings(history_horizon_days=30)
    assert Settings(history_horizon_days=31).undo_days == 31


@pytest.mark.parametrize("name", ["snapshot_keep_count", "snapshot_keep_days", "undo_days", "position_days"])
def test_negative_retentions_are_refused(name: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Settings(**{name: -1})
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]


DURATIONS = [
    name
    for name in Settings.model_fields
    if name.rpartition("_")[2] in {"s", "min", "h", "hours", "days"} and name != "reap_interval_min"
]


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("days", ["inf", 36_526, 1e9, 1e300])
def test_a_duration_is_at_most_a_century(name: str, days: float) -> None:
    units = {"s": 86400, "min": 1440, "h": 24, "hours": 24, "days": 1}
    with pytest.raises(ValidationError) as raised:
        Settings(**{name: float(days) * units[name.rpartition("_")[2]]})
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]


@pytest.mark.parametrize(
    "name",
    [
        "state_dir",
        "landing",
        "ivy_settings",
        "kafka_ca",
        "kafka_certificate",
        "nessie_uri",
        "spark_remote",
    ],
)
def test_a_variable_without_a_value_is_neither_a_folder_nor_a_server(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"BRANCHLAKE_{name.upper()}", "")
    with pytest.raises(ValidationError) as raised:
        Settings()
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]


def test_a_century_is_no_error() -> None:
    settings = Settings(history_horizon_days=36_525, undo_days=36_525, orphan_file_grace_h=24 * 36_525)
    assert settings.history_horizon == timedelta(days=36_525)


@pytest.mark.parametrize("character", "?#\n\t")
def test_a_folder_whose_name_would_be_cut_is_refused(character: str) -> None:
    """PyIceberg would write the files of all tables to one path."""
    for values in ({"warehouse": f"file:///lake{character}1"}, {"state_dir": f"/lake{character}1"}):
        with pytest.raises(ValidationError):
            Settings(**values)
    assert Settings(state_dir="/lake#1", warehouse="s3://lake/tables").warehouse_uri == "s3://lake/tables"


def test_the_resource_has_a_field_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With BRANCHLAKE_HISTORY_HORIZON_DAYS, definitions did not load: the resource had no such field."""
    assert Settings.model_fields.keys() - LakehouseResource.model_fields.keys() == set()
    monkeypatch.setenv("BRANCHLAKE_HISTORY_HORIZON_DAYS", "40")
    monkeypatch.setenv("BRANCHLAKE_UNDO_DAYS", "35")
    settings = LakehouseResource.from_settings(Settings()).lakehouse.settings
    assert (settings.history_horizon_days, settings.undo_days) == (40, 35)


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("sc://h:15002", "sc://h:15002/;token=secret"),
        ("sc://h:15002/", "sc://h:15002/;token=secret"),
        ("sc://h:15002/;use_ssl=true", "sc://h:15002/;use_ssl=true;token=secret"),
        ("sc://h:15002/;token=other", "sc://h:15002/;token=other"),
    ],
)
def test_the_token_joins_whatever_the_url_has(remote: str, expected: str) -> None:
    assert connect_url(remote, "secret") == expected


def test_no_secret_is_printed() -> None:
    settings = Settings(nessie_token="n-secret", spark_token="s-secret", s3_secret_access_key="k-secret")
    assert "secret" not in repr(settings).replace("secret_access_key", "")
    assert "s-secret" not in repr(Endpoints("http://x", "sc://y", "s-secret"))


def test_a_mistyped_variable_is_an_error_that_names_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """BRANCHLAKE_NESSIE_URL wrote to the embedded lake instead of the one that was meant."""
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URL", "https://nessie.example.org/api/v2")
    with raising(
        ConfigurationError,
        "BRANCHLAKE_NESSIE_URI?",
        reason="unknown_variable",
        subject="BRANCHLAKE_NESSIE_URL",
    ):
        Settings()


@pytest.mark.parametrize("kind", [Settings, LakehouseResource])
@pytest.mark.parametrize(
    ("name", "meant"), [("nessie_url", "nessie_uri"), ("keep_failed_hour", "keep_failed_hours")]
)
def test_a_mistyped_field_is_an_error_that_names_the_right_one(kind: Any, name: str, meant: str) -> None:
    """LakehouseResource(nessie_url=…) was accepted, and wrote to the embedded lake."""
    with pytest.raises(ConfigurationError) as caught:
        kind(**{name: "1"})
    assert meant in str(caught.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "BRANCHLAKE_DATA_MODE",
        "BRANCHLAKE_GP_DIR",
        "BRANCHLAKE_GP_PULL",
        "BRANCHLAKE_KEEP_RECORDS",
        "BRANCHLAKE_LIVE_SENSORS",
        "BRANCHLAKE_SENSORS",
        "BRANCHLAKE_TEST_ANYTHING",
        "branchlake_nessie_port",
        "OTHER",
    ],
)
def test_variables_that_are_read_or_somebody_elses_are_fine(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    assert Settings()


def test_plans_for_a_remote_spark_hold_no_s3_keys() -> None:
    keys = {"s3_access_key_id": "id", "s3_secret_access_key": "hidden", "warehouse": "s3://lake/tables"}
    embedded = Settings(**keys)
    assert embedded.worker_file_io_properties() == embedded.file_io_properties()
    remote = Settings(**keys, spark_remote="sc://spark:15002")
    assert "hidden" in remote.file_io_properties().values()
    assert {"id", "hidden"}.isdisjoint(remote.worker_file_io_properties().values())
    assert remote.worker_file_io_properties()["s3.region"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("nessie_uri", "s3_endpoint")
            for value in (
                "localhost:19120",
                "sc://localhost:1",
                "http://",
                "http://:19120",
                "http://nessie:99999",
                "http://nessie:x",
                "http://my nessie:19120",
                " http://nessie:19120",
                "http:/nessie",
            )
        ),
        ("nessie_uri", ""),
        *(
            ("spark_remote", value)
            for value in ("", "spark:15002", "http://spark:15002", "sc://", "sc://a b")
        ),
        *(("warehouse", value) for value in ("", " ", "s3://lake/tables ", " s3://lake", "lake/tables")),
        *(("kafka_bootstrap", value) for value in ("kafka 9092", "kafka:x", "a:1/b")),
        *(("receivers", value) for value in ("localhost:9464", "http://a:1,b:2")),
        *(
            ("spark_driver_memory", value)
            for value in ("", "-3g", "0g", "much", "3gb", "3GB", "3072", "1.5g", "3 g", "64m", "3e")
        ),
        *(("spark_java_options", value) for value in ("-Xmx4g", "-Da=b -Xmx4g")),
    ],
)
def test_a_wrong_address_is_refused_at_once(name: str, value: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Settings(**{name: value})
    assert [error["loc"] for error in raised.value.errors()] == [(name,)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nessie_uri", "http://localhost:19120/api/v2"),
        ("nessie_uri", "HTTPS://user:pass@[::1]/api/v2"),
        ("spark_remote", "sc://spark:15002/;use_ssl=true;token=a"),
        ("warehouse", "file:///srv/my lake"),
        ("kafka_bootstrap", "kafka-1:9092, SASL_SSL://kafka_2:9093,[::1]:9092,kafka"),
        ("receivers", "http://a:1, https://b:2,"),
        *(("spark_driver_memory", value) for value in ("3072m", "3G", "1t", "524288k")),
        ("spark_java_options", "-Xss8m -XX:MaxRAMPercentage=50"),
    ],
)
def test_a_right_address_is_accepted(name: str, value: str) -> None:
    assert getattr(Settings(**{name: value}), name) == value


def test_a_field_of_a_resource_may_be_a_variable_whatever_its_values_look_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = LakehouseResource(
        nessie_uri=dg.EnvVar("LAKE_NESSIE"),
        warehouse=dg.EnvVar("LAKE_WAREHOUSE"),
        preview_rows=dg.EnvVar.int("LAKE_ROWS"),
    )

    monkeypatch.setenv("LAKE_NESSIE", "https://nessie.example.org/api/v2")
    monkeypatch.setenv("LAKE_WAREHOUSE", "s3://lake/tables")
    monkeypatch.setenv("LAKE_ROWS", "7")
    settings = lake.effective()
    assert (settings.nessie_uri, settings.warehouse, settings.preview_rows) == (
        "https://nessie.example.org/api/v2",
        "s3://lake/tables",
        7,
    )


def test_a_value_of_a_variable_is_validated_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = LakehouseResource(warehouse=dg.EnvVar("LAKE_WAREHOUSE"))

    monkeypatch.setenv("LAKE_WAREHOUSE", "relative/folder")
    with pytest.raises(ValidationError):
        lake.effective()


@pytest.mark.parametrize(
    "fields", [{"warehouse": "relative/folder"}, {"publish_interval_s": 0}, {"reap_interval_min": 7}]
)
def test_a_value_beside_a_variable_is_validated_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LakehouseResource(nessie_uri=dg.EnvVar("LAKE_NESSIE"), **fields)


def test_values_that_only_fit_a_variable_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = LakehouseResource(s3_access_key_id="key", s3_secret_access_key=dg.EnvVar("LAKE_SECRET"))
    monkeypatch.setenv("LAKE_SECRET", "hidden-word")
    assert lake.effective().s3_access_key_id is not None


@pytest.mark.parametrize(
    ("name", "build_variable"),
    [
        ("orphan_file_grace_h", dg.EnvVar),
        ("orphan_file_grace_h", dg.EnvVar.int),
        ("nessie_port", dg.EnvVar),
        ("require_checks", dg.EnvVar),
        ("warehouse", dg.EnvVar.int),
    ],
)
def test_a_variable_that_dagster_cannot_read_for_a_field_is_refused_by_name(
    name: str, build_variable: Callable[[str], Any]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        LakehouseResource(**{name: build_variable("LAKE_FIELD")})
    assert (refused.value.reason, refused.value.subject) == ("variable_unsupported", name)


class RegionalLake(LakehouseResource):
    """A lake with fields of its own, which are not settings."""

    region: str = ""
    rack: int = 0


def test_fields_of_a_subclass_can_be_variables() -> None:
    lake = RegionalLake(region=dg.EnvVar("LAKE_REGION"), rack=dg.EnvVar.int("LAKE_RACK"))
    assert lake.effective() == LakehouseResource().effective()
    with pytest.raises(ConfigurationError) as refused:
        RegionalLake(region=dg.EnvVar("LAKE_REGION"), nessie_port=dg.EnvVar("LAKE_PORT"))
    assert refused.value.subject == "nessie_port"


def test_a_resource_whose_secret_is_missing_where_the_definitions_load_can_be_nested() -> None:
    lake = LakehouseResource(
        warehouse=dg.EnvVar("LAKE_WAREHOUSE"),
        spark_remote="sc://localhost:15002",
        spark_token=dg.EnvVar("LAKE_TOKEN"),
    )

    assert BranchSparkResource(lakehouse=lake).lakehouse.warehouse == lake.warehouse
    assert branchlake_definitions(lakehouse=lake).resources is not None


@pytest.mark.parametrize("brokers", ["a:1,b:2,", "PLAINTEXT://a:1, b", "[fe80::1%eth0]:9092", ""])
def test_lists_of_brokers_are_as_kafka_accepts_them(brokers: str) -> None:
    assert Settings(kafka_bootstrap=brokers).kafka_bootstrap == brokers


def test_an_empty_endpoint_is_that_of_aws() -> None:
    assert not Settings(s3_endpoint="").s3_endpoint


def test_an_invalid_address_is_not_shown_because_it_can_contain_a_secret() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(spark_remote="sc://h:15002;token=hidden-word")
    assert "hidden-word" not in str(refused.value)
