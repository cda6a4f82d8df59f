"""An asset's Iceberg table: declared spec, schema, partitioning, the rows of a partition, provenance."""
