"""The embedded lakehouse: a Nessie and a Spark Connect server on loopback, started on demand."""
