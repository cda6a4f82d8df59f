"""Records as rows: formats, routes, operations, and what makes a record a dead letter."""
