"""What assets return and are given, and how it is written and read: Spark, Arrow, Polars, pandas."""
