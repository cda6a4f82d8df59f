import pytest
from pydantic import ValidationError

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.embedded.servers import Endpoints
from branchlake_dagster.lakehouse.spark.session import connect_url
from branchlake_dagster.settings import Settings


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("True", True), ("/etc/ca.pem", "/etc/ca.pem")]
)
def test_tls_verification_is_a_switch_or_a_bundle(
    monkeypatch: pytest.MonkeyPatch, text: str, value: object
) -> None:
    monkeypatch.setenv("BRANCHLAKE_NESSIE_VERIFY_TLS", text)
    assert Settings().nessie_verify_tls == value


def test_the_reaper_runs_at_even_distances() -> None:
    with pytest.raises(ValidationError, match="does not divide an hour"):
        Settings(reap_interval_min=45)


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
    with pytest.raises(
        ConfigurationError, match=r"BRANCHLAKE_NESSIE_URL.*Did you mean BRANCHLAKE_NESSIE_URI"
    ):
        Settings()


@pytest.mark.parametrize(
    "name",
    [
        "BRANCHLAKE_GP_DIR",
        "BRANCHLAKE_GP_PULL",
        "BRANCHLAKE_LIVE_SENSORS",
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
