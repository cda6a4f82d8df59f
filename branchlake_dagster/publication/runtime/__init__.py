"""What a code location is given: definitions, the publication sensor, publication inside a run."""
