"""A PyIceberg catalog on Nessie.

`load_catalog("nessie", **{"py-catalog-impl": "branchlake_dagster.catalog.NessieCatalog", …})`
"""

from branchlake_dagster.catalog.catalog import NessieCatalog

__all__ = ["NessieCatalog"]
