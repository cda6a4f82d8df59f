"""What a step consumes of its inputs' changes, and how that is remembered with its result."""
