"""`branchlake conjunctions`."""
