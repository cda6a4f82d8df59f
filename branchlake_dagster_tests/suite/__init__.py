"""How the suite is run: what a test needs, and what guards that."""
