"""`branchlake columns`."""
