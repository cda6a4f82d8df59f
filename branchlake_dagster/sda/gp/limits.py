"""Decode the bytes of a GP file within limits, because a megabyte of gzip may hold gigabytes.

A GP file (general perturbations) has the element sets of many objects, as a provider serves them.
"""

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
    """Limits on the size of a GP file: `max_bytes` after unpacking, `max_record_chars` for each record.

    All objects in Earth orbit as OMM XML, the largest encoding, take about 90 MB.
    """

    max_bytes: int = 256 * 1024 * 1024
    max_record_chars: int = 65_536


def decode_gp_file(content: bytes, source: str, limits: ReadLimits) -> str:
    r"""Decode the text of a GP file, gzipped or not, and normalize its line ends to ``\n``.

    The encoding is UTF-8, or UTF-16 if the byte order mark announces it. Invalid bytes become ``?``, so only
    the records that contain them are rejected.

    Raises:
        TooLargeCatalogueError: the file unpacks to more than the limit. Unpacking stops there.
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
    """Unpack a gzip stream; stop as soon as the limit is exceeded."""
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
        raise UnreadableCatalogueError(
            source, f"the gzip stream is damaged ({error})", "Fetch the file again."
        ) from error
    return b"".join(chunks)


def _too_large_error(source: str, limits: ReadLimits) -> TooLargeCatalogueError:
    return TooLargeCatalogueError(
        source,
        f"it has more than {limits.max_bytes:,} bytes after unpacking",
        "If this size is expected, raise the GP source's max_unpacked_mb or divide the file.",
    )
