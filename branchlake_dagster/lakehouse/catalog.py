"""The former module of `NessieCatalog`, which PyIceberg configurations of users name as `py-catalog-impl`."""

from __future__ import annotations

from branchlake_dagster.catalog import NessieCatalog

__all__ = ["NessieCatalog"]
