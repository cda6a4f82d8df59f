"""`branchlake bench`: where the time goes."""
