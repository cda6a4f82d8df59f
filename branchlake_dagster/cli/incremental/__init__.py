"""`branchlake consumers` and `branchlake backfill`."""
