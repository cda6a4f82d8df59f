import pytest
from pydantic import ValidationError

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
