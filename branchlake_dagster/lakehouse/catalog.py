"""The former module of `NessieCatalog`. PyIceberg configurations name it as `py-catalog-impl`."""

from __future__ import annotations

from branchlake_dagster.catalog import NessieCatalog

__all__ = ["NessieCatalog"]
