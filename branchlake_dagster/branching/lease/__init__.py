"""Exclusive writers: who may publish under a name, by a fencing token that lies on `main` itself."""
