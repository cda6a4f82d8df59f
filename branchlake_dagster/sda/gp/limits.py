"""From a file's bytes to its text, within limits: a megabyte of gzip may hold gigabytes."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from dataclasses import dataclass

from branchlake_dagster.sda.gp.records import TooLargeCatalogueError, UnreadableCatalogueError

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(frozen=True)
class ReadLimits:
    """What a GP file may cost. `max_bytes` is the size after unpacking, `max_record_chars` of one record.

    All objects of Earth orbit as OMM XML, the largest encoding, are about 90 MB.
    """

    max_bytes: int = 256 * 1024 * 1024
    max_record_chars: int = 65_536


def decode_gp_file(content: bytes, source: str, limits: ReadLimits) -> str:
    r"""Text of a GP file, unpacked when gzipped, its lines ended by ``\n`` whatever they were ended by.

    UTF-8, or what the byte order mark says (UTF-8, UTF-16). Bytes outside of it become ``?`` and fail as
    records.

    Raises:
        TooLargeCatalogueError: it unpacks to more than the limit; no more than that is ever held.
        UnreadableCatalogueError: the gzip stream is cut short or damaged.

    """
    if content.startswith(_GZIP_MAGIC):
        content = _unpack_gzip(content, source, limits)
    if len(content) > limits.max_bytes:
        raise _too_large_error(source, limits)
    byte_order_mark, encoding = next(((m, e) for m, e in _BOMS if content.startswith(m)), (b"", "utf-8"))
    file_text = content[len(byte_order_mark) :].decode(encoding, errors="replace").replace("\ufffd", "?")
    if "\r" in file_text:
        file_text = file_text.replace("\r\n", "\n").replace("\r", "\n")
    return file_text


def _unpack_gzip(content: bytes, source: str, limits: ReadLimits) -> bytes:
    """Never a step further than the limit."""
    chunks: list[bytes] = []
    size = 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as gzip_file:
            while chunk := gzip_file.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > limits.max_bytes:
                    raise _too_large_error(source, limits)
                chunks.append(chunk)
    except (EOFError, OSError, zlib.error) as error:
        raise UnreadableCatalogueError(source, f"damaged gzip ({error})", "Fetch the file again.") from error
    return b"".join(chunks)


def _too_large_error(source: str, limits: ReadLimits) -> TooLargeCatalogueError:
    return TooLargeCatalogueError(
        source,
        f"more than {limits.max_bytes:,} bytes after unpacking",
        "If it is no mistake or attack, raise the GP source's max_unpacked_mb or divide the file.",
    )
