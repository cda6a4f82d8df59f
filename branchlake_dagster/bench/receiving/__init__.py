"""`branchlake bench receive` and `branchlake bench live`."""
