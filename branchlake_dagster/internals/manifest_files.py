"""Reads manifests and manifest lists from their bytes, with parts of PyIceberg that it does not export.

`ManifestFile.fetch_manifest_entry` creates an object for every entry, which takes 40 µs. It also resolves the
schema of each file again, which takes half a millisecond, or two in `read_manifest_list`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import lru_cache

from pyiceberg.avro.decoder import BinaryDecoder, new_decoder
from pyiceberg.avro.file import MAGIC, META_SCHEMA, SYNC_SIZE, AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader, resolve_reader
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
    _inherit_from_manifest,
)
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

__all__ = ["iter_entries", "iter_manifests"]

_SCHEMA = "avro.schema"
_HEADER_READER = construct_reader(META_SCHEMA, {-1: AvroFileHeader})


def iter_entries(
    manifest: ManifestFile, content: bytes, positions: Collection[int] | None = None
) -> Iterator[ManifestEntry]:
    """Yield the entries of a manifest file in their order, including those of deleted files.

    `content` are the bytes of the file. If `positions` is given, only the entries at these positions (from 0)
    are yielded. Blocks of the file without one of these positions are not decompressed.
    """
    decoder = new_decoder(content)
    header = _read_header(decoder)
    reader = _entry_reader(header.meta[_SCHEMA])
    sorted_positions = None if positions is None else sorted(set(positions))
    start = yielded_count = 0
    while decoder.tell() < len(content) and (
        sorted_positions is None or yielded_count < len(sorted_positions)
    ):
        count, size = decoder.read_int(), decoder.read_int()
        end = start + count
        if sorted_positions is not None and sorted_positions[yielded_count] >= end:
            decoder.skip(size + SYNC_SIZE)
        else:
            records = _read_block(decoder, size, header)
            for position in range(start, end):
                entry = _read_entry(reader, records)
                if sorted_positions is None or (
                    yielded_count < len(sorted_positions) and sorted_positions[yielded_count] == position
                ):
                    yielded_count += 1
                    yield _inherit_from_manifest(entry, manifest)
        start = end


def iter_manifests(content: bytes) -> Iterator[ManifestFile]:
    """Yield the manifests in a manifest list, in their order. `content` are the bytes of the file."""
    decoder = new_decoder(content)
    header = _read_header(decoder)
    reader = _manifest_reader(header.meta[_SCHEMA])
    while decoder.tell() < len(content):
        count, size = decoder.read_int(), decoder.read_int()
        records = _read_block(decoder, size, header)
        for _ in range(count):
            yield reader.read(records)


def _read_header(decoder: BinaryDecoder) -> AvroFileHeader:
    header: AvroFileHeader = _HEADER_READER.read(decoder)
    if header.magic != MAGIC:
        raise ValueError("This is not an Avro file.")
    return header


def _read_block(decoder: BinaryDecoder, size: int, header: AvroFileHeader) -> BinaryDecoder:
    """Return a decoder for the records of the block that begins at the decoder's position.

    Raises ValueError if the marker after the block is missing, as in a truncated file.
    """
    block = decoder.read(size)
    if decoder.read(SYNC_SIZE) != header.sync:
        raise ValueError("A block of the Avro file does not end with the file's marker.")
    codec = header.compression_codec()
    return new_decoder(codec.decompress(block) if codec else block)


def _read_entry(reader: Reader, records: BinaryDecoder) -> ManifestEntry:
    entry: ManifestEntry = reader.read(records)
    return entry


@lru_cache(maxsize=64)
def _manifest_reader(schema: str) -> Reader:
    """Return the reader for manifest lists with this schema. The reader stores no data of a file."""
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
        MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: ManifestFile, 508: PartitionFieldSummary},
        {517: ManifestContent},
    )


@lru_cache(maxsize=64)
def _entry_reader(schema: str) -> Reader:
    """Return the reader for entries of manifests with this schema. The reader stores no data of a file."""
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(schema)),
        MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: ManifestEntry, 2: DataFile},
        {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    )
