"""The pass over a batch's records: which tables take them, converted by Spark, written by its workers."""
