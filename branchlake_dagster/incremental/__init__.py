"""Assets that consume changes, seen from outside a run: what they have left, and runs for just that."""
