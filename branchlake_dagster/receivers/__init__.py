"""Receivers of live sources: they write messages from UDP, TCP and HTTP as records of a topic.

The topic is a Kafka topic, or a folder of Parquet files, the landing folder (`landing`).
"""
