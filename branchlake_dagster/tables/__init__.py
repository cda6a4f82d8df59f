"""The table of an asset: its declaration, schema, partitions and frames, and how rows are written to it."""
