"""Computing partitions again, and what follows from it stage by stage: planned, launched, looked at."""
