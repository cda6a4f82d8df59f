"""The benchmarks of `branchlake bench`."""
