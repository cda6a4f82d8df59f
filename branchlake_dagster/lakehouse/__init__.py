"""The lake as one object: its settings, Nessie client, catalog and Spark sessions."""
