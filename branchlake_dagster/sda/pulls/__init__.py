"""Files of providers become element sets, catalog entries and rejected records, on Spark's workers."""
