"""Files of certificates and keys, as librdkafka and Java take them: PEM."""

from __future__ import annotations

import re
from pathlib import Path

from branchlake_dagster.errors import ConfigurationError

_CERTIFICATES = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)


def certificates(file: Path) -> str:
    """A bundle of authorities, as it is. Raises ConfigurationError."""
    hint = "BRANCHLAKE_KAFKA_CA is a file of PEM certificates."
    found = _text(file, "certificates", hint)
    if "-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigurationError(
            f"{file} holds no certificate.", hint=hint, reason="no_certificate", subject=str(file)
        )
    return found


def own_certificate(file: Path) -> tuple[str, str]:
    """The private key, and the chain of certificates. Raises ConfigurationError, which never has the key."""
    hint = "BRANCHLAKE_KAFKA_CERTIFICATE is a PEM file with a private key (PKCS #8) and its certificates."
    found = _text(file, "certificate", hint)
    key, chain = _KEY.search(found), _CERTIFICATES.findall(found)
    if not chain:
        raise ConfigurationError(
            f"{file} holds no certificate.", hint=hint, reason="no_certificate", subject=str(file)
        )
    if key is None:
        if "PRIVATE KEY-----" not in found:
            raise ConfigurationError(
                f"{file} holds no private key.", hint=hint, reason="no_private_key", subject=str(file)
            )
        raise ConfigurationError(
            f"The private key in {file} is encrypted, or in a form that Java does not read.",
            hint="openssl pkcs8 -topk8 -nocrypt -in key.pem makes one that it does. The certificates come"
            " behind it.",
            reason="private_key_form",
            subject=str(file),
        )
    return key[0], "\n".join(chain)


def _text(file: Path, what: str, hint: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(
            f"The {what} {file} cannot be read: {why}.", hint=hint, reason="unreadable", subject=str(file)
        ) from error
