"""The TLS options against a real HTTPS server with a certificate of our own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import NessieRefused
from branchlake_dagster.nessie.model import ContentKey, Delete
from branchlake_dagster_tests.suite.raised import raising

H = "ab" * 32
BRANCH = b'{"reference": {"type": "BRANCH", "name": "bb", "hash": "%s"}}' % H.encode()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a key and a certificate for 127.0.0.1 that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + built.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def https_uri(certificate: Path) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BRANCH)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/api/v2"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_untrusted_certificate_is_refused_and_nothing_is_sent(https_uri: str) -> None:
    with NessieClient(https_uri, retry=RetryPolicy(())) as client:
        with raising(NessieRefused, reason="certificate"):
            client.reference("bb")
        with raising(NessieRefused, reason="certificate"):
            client.commit("bb", expected_hash=H, operations=[Delete(ContentKey(["t"]))], message="m")


def test_a_ca_bundle_reaches_every_call(
    https_uri: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # requests lets this variable win over a session's own verify.
    import certifi

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    with NessieClient(https_uri, verify=str(certificate), retry=RetryPolicy(())) as client:
        assert client.reference("bb").hash == H
        assert client.create_branch("bb", from_ref="main", from_hash=H).hash == H
        client.delete_branch("bb", expected_hash=H)


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_verification_can_be_switched_off(https_uri: str) -> None:
    with NessieClient(https_uri, verify=False, retry=RetryPolicy(())) as client:
        assert client.reference("bb").hash == H
