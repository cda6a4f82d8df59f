"""Secrets reach a remote Spark over TLS only."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder

from branchlake_dagster import LakehouseResource
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.errors import ConfigurationError, SecretWithoutTls
from branchlake_dagster.ingest import topic_source as source
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.settings import Settings, require_tls
from branchlake_dagster.spark.session import open_session

CLEAR = "sc://spark.example.org:15002"
SECRET = "never-shown"

IN_CLEAR = [
    CLEAR,
    "sc://spark:15002/",
    "sc://spark",
    "sc://10.1.2.3:15002",
    "sc://[2001:db8::1]:15002",
    "sc://spark:15002/;use_ssl=false",
    "sc://spark:15002/;user_id=use_ssl%3Dtrue",
    "sc://localhost.example.org:15002",
    "sc://127.0.0.1.example.org:15002",
]
SAFE = [
    "sc://spark:15002/;use_ssl=true",
    "sc://spark:15002/;user_id=me;use_ssl=TRUE",
    "sc://spark:15002/;token=abc",
    "sc://localhost:15002",
    "sc://LOCALHOST",
    "sc://127.0.0.1:15002",
    "sc://127.8.9.1:15002/;use_ssl=false",
    "sc://[::1]:15002",
]


@pytest.mark.parametrize("remote", IN_CLEAR)
def test_a_secret_is_not_sent_in_clear(remote: str) -> None:
    assert not DefaultChannelBuilder(remote).secure
    require_tls(remote, [])
    with pytest.raises(SecretWithoutTls) as caught:
        require_tls(remote, ["a secret"])
    assert caught.value.secrets == ("a secret",)
    require_tls(remote, ["a secret"], token=True)


@pytest.mark.parametrize("remote", SAFE)
def test_tls_and_loopback_are_safe(remote: str) -> None:
    builder = DefaultChannelBuilder(remote)
    assert builder.secure or builder.host in ("localhost", "127.0.0.1", "127.8.9.1", "[::1]")
    require_tls(remote, ["a secret"])


def test_what_a_url_holds_besides_is_not_shown() -> None:
    with pytest.raises(SecretWithoutTls) as caught:
        require_tls(f"sc://me:{SECRET}@spark:15002/;x-header={SECRET}", ["a secret"])
    assert SECRET not in str(caught.value)


# -- when the settings are resolved --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"nessie_token": SECRET}, ["BRANCHLAKE_NESSIE_TOKEN"]),
        ({"kafka_password": SECRET}, ["BRANCHLAKE_KAFKA_PASSWORD"]),
        ({"kafka_certificate": "/own.pem"}, ["BRANCHLAKE_KAFKA_CERTIFICATE"]),
        (
            {"nessie_token": SECRET, "kafka_password": SECRET},
            ["BRANCHLAKE_NESSIE_TOKEN", "BRANCHLAKE_KAFKA_PASSWORD"],
        ),
    ],
    ids=lambda value: ",".join(value),
)
def test_settings_that_would_send_a_secret_in_clear_are_refused(
    given: dict[str, Any], variables: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for make in (Settings, LakehouseResource):
        with pytest.raises(SecretWithoutTls) as caught:
            make(spark_remote=CLEAR, **given)
        assert isinstance(caught.value, ConfigurationError)
        assert len(caught.value.secrets) == len(variables)
        assert all(name in text for name, text in zip(variables, caught.value.secrets, strict=True))
        assert SECRET not in str(caught.value)
        assert "spark.example.org:15002" in caught.value.message
    monkeypatch.setenv("BRANCHLAKE_SPARK_REMOTE", CLEAR)
    for name, value in given.items():
        monkeypatch.setenv(f"BRANCHLAKE_{name.upper()}", value)
    with pytest.raises(SecretWithoutTls):
        Settings()
    for more in (
        {"spark_remote": f"{CLEAR}/;use_ssl=true"},
        {"spark_remote": "sc://127.0.0.1:15002"},
        {"spark_token": "t"},
        {"session_kind": "classic"},
    ):
        assert Settings(**more)


def test_settings_without_such_a_secret_need_no_tls() -> None:
    keys = {"s3_access_key_id": "id", "s3_secret_access_key": SECRET, "warehouse": "s3://lake/tables"}
    assert Settings(spark_remote=CLEAR, nessie_uri="https://nessie.example.org/api/v2", **keys)


# -- when a session is opened --------------------------------------------------------------------------


class Reached(Exception):  # noqa: N818
    """Instead of a connection."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URLs that sessions were opened at; there is no server."""
    urls: list[str] = []

    def remote(_: object, url: str) -> object:
        urls.append(url)
        raise Reached

    monkeypatch.setattr(SparkSession.Builder, "remote", remote)
    return urls


def opened(endpoints: Endpoints, **conf: str) -> None:
    settings = Settings(spark_remote=endpoints.spark_remote, nessie_uri=endpoints.nessie_uri)
    open_session(settings, endpoints, ref="main", conf={k.replace("_", "."): v for k, v in conf.items()})


def test_the_token_of_an_embedded_nessie_is_not_sent_in_clear(connected: list[str]) -> None:
    endpoints = Endpoints("http://127.0.0.1:1/api/v2", CLEAR, None, SECRET)
    with pytest.raises(SecretWithoutTls) as caught:
        opened(endpoints)
    assert connected == []
    assert "run/nessie.token" in caught.value.secrets[0]
    assert SECRET not in str(caught.value)
    for remote, token in ((f"{CLEAR}/;use_ssl=true", None), (CLEAR, "t"), ("sc://localhost:1", None)):
        with pytest.raises(Reached):
            opened(Endpoints("http://127.0.0.1:1/api/v2", remote, token, SECRET))
    assert len(connected) == 3


def test_a_secret_among_a_users_own_settings_is_not_sent_in_clear(connected: list[str]) -> None:
    endpoints = Endpoints("http://nessie.example.org/api/v2", CLEAR, None)
    with pytest.raises(SecretWithoutTls) as caught:
        opened(endpoints, spark_hadoop_fs_s3a_secret_key=SECRET)
    assert caught.value.secrets == ("the session's setting spark.hadoop.fs.s3a.secret.key",)
    assert connected == []
    with pytest.raises(Reached):
        opened(endpoints, spark_sql_shuffle_partitions="4")
    assert connected == [CLEAR]


def test_a_server_that_only_a_session_names_counts(connected: list[str]) -> None:
    settings, local = Settings(), Endpoints("http://127.0.0.1:1/api/v2", "sc://localhost:1", None, SECRET)
    with pytest.raises(SecretWithoutTls):
        open_session(settings, local, ref="main", conf={"spark.remote": CLEAR})
    assert connected == []


def test_the_embedded_brokers_password_is_not_sent_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    table = IngestTable(key=["a", "t"], columns={"id": "int"})
    ingest = Ingest(name="orders", topics=["orders"], tables=[table])
    embedded = KafkaCluster("127.0.0.1:9", "SASL_PLAINTEXT", "PLAIN", "branchlake", SECRET)
    monkeypatch.setattr(source, "configured_cluster", lambda _: embedded)
    with pytest.raises(SecretWithoutTls) as caught:
        source.open_topic_source(ingest, Settings(spark_remote=CLEAR))
    assert "127.0.0.1:9" in caught.value.secrets[0]
    assert SECRET not in str(caught.value)
    assert source.open_topic_source(ingest, Settings())
