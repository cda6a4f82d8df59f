"""Manages the state folder of an embedded lake: its recorded location, its permissions, and Nessie's token.

Iceberg metadata contains absolute paths. In a copy of a state folder these paths point to the original: reads
return the original's rows, and a cleanup would delete the original's files. In a moved folder they point to
files that no longer exist. So the first start records the location in the folder.

Only the owner can read the subfolders with secrets: the tokens, the logs (which quote data and paths) and the
store. A user who can write to the store can change `main`.

The embedded Nessie requires a bearer token, so that other accounts of the machine cannot use its port. Nessie
0.99 accepts only signed tokens, because its build disables users with passwords. With a public key in its
settings, it verifies tokens without an identity provider. So a new private key signs one token and is
discarded: a second token for this public key cannot be created. Plain integer arithmetic is enough, because
nothing is signed for others.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal

_OTHERS_MASK = 0o077
_OTHER_FOLDER_HINT = "Name another folder in BRANCHLAKE_STATE_DIR."


def make_state_folder(root: Path) -> Path:
    """Create the state folder for its owner alone, if it does not exist, and return it.

    An existing folder keeps its permissions, because a user may have opened it to a group on purpose. Secrets
    are in subfolders from `make_private_folder`. Raises ConfigurationError if the path is a file, or if the
    folder cannot be created or written.
    """
    require_no_file(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigurationError(
            f"The state folder {root} cannot be created: {error.strerror}.",
            hint=_OTHER_FOLDER_HINT,
            reason="not_made",
            subject=str(root),
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The state folder {root} is not writable.",
            hint=_OTHER_FOLDER_HINT,
            reason="not_writable",
            subject=str(root),
        )
    return root


def require_no_file(root: Path) -> None:
    """Raise ConfigurationError if the state folder `root` or one of its parents is a file. Writes nothing."""
    file = next((path for path in (root, *root.parents) if path.is_file()), None)
    if file is not None:
        raise ConfigurationError(
            f"The state folder cannot be {root}: {file} is a file.",
            hint=_OTHER_FOLDER_HINT,
            reason="not_a_folder",
            subject=str(file),
        )


def make_private_folder(folder: Path) -> Path:
    """Create a folder for its owner alone and return it. Restricts an existing folder, too."""
    make_state_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & _OTHERS_MASK:
        folder.chmod(0o700)
    return folder


def write_secret(path: Path, secret: str) -> None:
    """Atomic: write a text file that other users can never read, not even while it is incomplete.

    Replaces an existing file. Its folder is made private, too. Raises OSError, or ConfigurationError if the
    parent of its folder cannot be created or is not writable.
    """
    make_private_folder(path.parent)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(secret)
    scratch.replace(path)


_LOCATION_FILE = "lake.json"


class LakeNotRunning(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The lake's embedded Nessie does not run, and a read-only command does not start it."""


class LakeMoved(ConfigurationError):  # noqa: N818
    """The state folder was moved or copied, and its tables point to files in the old location."""


def has_lake(root: Path) -> bool:
    """Return whether the embedded Nessie has ever been started on disk with the state folder `root`."""
    return (root / "nessie").is_dir()


def build_not_running(root: Path) -> LakeNotRunning:
    """Return the error for the state folder `root`: its lake is not running, or it has no lake.

    The hint has the command or the setting that helps.
    """
    if has_lake(root):
        return LakeNotRunning(
            f"The lake in {root} is not running.",
            hint=f"Start the lake: BRANCHLAKE_STATE_DIR={quote(str(root))} branchlake up",
            reason="stopped",
            subject=str(root),
        )
    return LakeNotRunning(
        f"There is no lake in {root}.",
        hint="Set BRANCHLAKE_STATE_DIR to the lake's folder, or BRANCHLAKE_NESSIE_URI to its server. "
        "`branchlake up` creates a new lake.",
        reason="no_lake",
        subject=str(root),
    )


def require_location(root: Path, *, tables_elsewhere: bool) -> None:
    """Raise LakeMoved if the lake in `root` was created in another folder. Writes nothing.

    With `tables_elsewhere` the tables are in a separate warehouse, and a moved lake is accepted. A copy is
    always refused, because its cleanup would delete the original's files.

    Raises ConfigurationError if the record of the folder cannot be read: the folder may be a copy.
    """
    recorded_root = _load_location(root)
    if recorded_root is None or recorded_root == root or _is_same_folder(recorded_root, root):
        return
    if recorded_root.exists():
        raise LakeMoved(
            f"The state folder {root} is a copy of the lake in {recorded_root}."
            " Its tables point to files of the original.",
            hint=f"Use the original: BRANCHLAKE_STATE_DIR={quote(str(recorded_root))}",
            reason="copied",
            subject=str(root),
        )
    if tables_elsewhere:
        return
    raise LakeMoved(
        f"The lake in {root} was moved from {recorded_root}. Its tables point to files in the old folder.",
        hint="Link the old path to the new folder and use the old path:"
        f" ln -s {quote(str(root))} {quote(str(recorded_root))};"
        f" BRANCHLAKE_STATE_DIR={quote(str(recorded_root))}",
        reason="moved",
        subject=str(root),
    )


def record_location(root: Path) -> None:
    """Record `root` as the location of the lake."""
    if _load_location(root) != root:
        scratch = make_state_folder(root) / f"{_LOCATION_FILE}.{os.getpid()}.tmp"
        with scratch.open("w") as file:
            json.dump({"state_dir": str(root)}, file)
            file.flush()
            os.fsync(file.fileno())  # a power failure must not leave an empty file
        scratch.replace(root / _LOCATION_FILE)


def _load_location(root: Path) -> Path | None:
    """Return the folder in which the lake was created; None if no folder is recorded yet."""
    path = root / _LOCATION_FILE
    try:
        return Path(json.loads(path.read_text())["state_dir"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read, so nothing shows whether {root} is a copy of another lake.",
            hint=f"If the lake was never copied or moved, remove the file: rm {quote(str(path))}. The next"
            " `branchlake up` writes it.",
            reason="location_unreadable",
            subject=str(path),
        ) from error


def _is_same_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


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
        credentials = Credentials(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_valid = isinstance(credentials.token, str) and isinstance(credentials.public_key, str)
    return credentials if is_valid else None


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
    """Return the RSA public key with this modulus as the DER form of a SubjectPublicKeyInfo."""
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
