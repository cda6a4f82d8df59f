"""`branchlake sda receive` and `branchlake sda simulate`."""
