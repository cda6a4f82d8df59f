"""Receivers of live sources: what comes in over UDP, TCP and HTTP, as records of a topic.

A topic is one of Kafka's, or a folder of files that stands for it (`landing`).
"""
