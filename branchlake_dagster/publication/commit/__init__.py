"""The publisher: passed branches become visible on `main` in one atomic commit."""
