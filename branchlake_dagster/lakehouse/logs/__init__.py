"""Log files of the embedded servers: what Spark writes into its own, and the rotation of all."""
