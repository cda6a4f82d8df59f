"""`branchlake sda conjunctions`."""
