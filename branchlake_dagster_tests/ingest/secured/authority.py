"""Certificates for a test: an authority, and what it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM


class Authority:
    """An authority of this name, whose files lie in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = _certificate(self._name, self._name, self._key.public_key())
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._built = built.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> str:
        """Its certificate."""
        return self._built.public_bytes(_PEM).decode()

    def file(self, name: str, *others: Authority) -> Path:
        """A file with the certificates of `others` and its own, with remarks, as bundles have them."""
        path = self._folder / name
        path.write_text("".join(f"# An authority\n{one.pem}\n" for one in (*others, self)))
        return path

    def signed(self, name: str, common: str, address: str = "127.0.0.1") -> Path:
        """A file with a key, and a certificate for this common name and address that the authority signed."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])
        at = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        built = _certificate(subject, self._name, key.public_key()).add_extension(at, critical=False)
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path = self._folder / name
        path.write_bytes(secret + built.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        return path


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
