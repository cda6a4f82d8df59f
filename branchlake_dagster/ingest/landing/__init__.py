"""Landing folders as what an ingestion reads: their topics, and which files are not needed any more."""
