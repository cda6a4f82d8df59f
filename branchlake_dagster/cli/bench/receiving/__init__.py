"""`branchlake bench receive`."""
