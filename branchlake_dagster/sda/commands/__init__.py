"""The commands `branchlake sda` and `branchlake demo`."""
