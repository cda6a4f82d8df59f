"""A Nessie that wants a token: every path with one, without one, and nowhere the token itself."""
