"""`branchlake receive` and `branchlake simulate`."""
