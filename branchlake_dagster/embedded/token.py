"""Create a bearer token for the embedded Nessie, so that other accounts of the machine cannot use its port.

Nessie 0.99 accepts only signed tokens, because its build disables users with passwords. With a public key in
its settings, it verifies tokens without an identity provider. So a new private key signs one token and is
discarded: a second token for this public key cannot be created. Plain integer arithmetic is enough, because
nothing is signed for others.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from branchlake_dagster.embedded.state_folder import write_secret

_BITS = 2048
_EXPONENT = 65537
_ROUNDS = 40
_SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")
"""The PKCS #1 prefix of a SHA-256 digest."""
_RSA = bytes.fromhex("300d06092a864886f70d0101010500")
"""The algorithm identifier of an RSA public key."""
_SMALL_PRIMES = [n for n in range(3, 2000, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2))]
_FOREVER = 4102444800  # 2100-01-01: the token lives as long as the state folder


@dataclass(frozen=True)
class Credentials:
    """A token and the public key that verifies it (base64 of the DER form, as Quarkus expects it)."""

    token: str
    public_key: str

    def __repr__(self) -> str:
        return "Credentials()"


def ensure_credentials(path: Path) -> Credentials:
    """Return the credentials at `path`. Creates them if they do not exist, which takes 0.5 s."""
    credentials = find_credentials(path)
    if credentials is None:
        credentials = create_credentials()
        write_secret(path, json.dumps(asdict(credentials)))
    return credentials


def find_credentials(path: Path) -> Credentials | None:
    """Return the credentials at `path`; None if the file does not exist or is damaged."""
    try:
        return Credentials(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def create_credentials() -> Credentials:
    """Create a token that is signed with a new private key, and discard the private key."""
    p = _random_prime(_BITS // 2)
    q = _random_prime(_BITS // 2)
    modulus, private_exponent = p * q, pow(_EXPONENT, -1, (p - 1) * (q - 1))
    header = {"alg": "RS256", "typ": "JWT"}
    claims = {"sub": "branchlake", "jti": secrets.token_hex(16), "iat": 0, "exp": _FOREVER}
    signed_part = ".".join(_encode_base64url(json.dumps(part).encode()) for part in (header, claims))
    size = _BITS // 8
    digest = _SHA256 + hashlib.sha256(signed_part.encode()).digest()
    padded_digest = b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest
    signature = pow(int.from_bytes(padded_digest, "big"), private_exponent, modulus).to_bytes(size, "big")
    return Credentials(
        f"{signed_part}.{_encode_base64url(signature)}",
        base64.b64encode(_encode_public_key(modulus)).decode(),
    )


def _encode_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _random_prime(bits: int) -> int:
    """Return a random prime whose two highest bits are set: the product of two has exactly twice the bits."""
    while True:
        candidate = secrets.randbits(bits) | (3 << (bits - 2)) | 1
        if (
            all(candidate % small for small in _SMALL_PRIMES)
            and _is_probably_prime(candidate)
            and (candidate - 1) % _EXPONENT
        ):
            return candidate


def _is_probably_prime(number: int) -> bool:
    """Return whether a number passes the Miller-Rabin primality test."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes_round(number, odd, twos, 2 + secrets.randbelow(number - 3)) for _ in range(_ROUNDS))


def _passes_round(number: int, odd: int, twos: int, base: int) -> bool:
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def _encode_public_key(modulus: int) -> bytes:
    """Return a public key as the DER form of a SubjectPublicKeyInfo."""
    key = _encode_der(0x30, _encode_integer(modulus) + _encode_integer(_EXPONENT))
    return _encode_der(0x30, _RSA + _encode_der(0x03, b"\x00" + key))


def _encode_integer(number: int) -> bytes:
    return _encode_der(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _encode_der(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content
