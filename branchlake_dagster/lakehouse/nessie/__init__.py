"""A typed client for Nessie's REST API v2."""
