"""Nessie as a PyIceberg catalogue.

`load_catalog("nessie", **{"py-catalog-impl": "branchlake_dagster.lakehouse.catalog.NessieCatalog", …})`
"""

from branchlake_dagster.lakehouse.catalog.catalog import NessieCatalog

__all__ = ["NessieCatalog"]
