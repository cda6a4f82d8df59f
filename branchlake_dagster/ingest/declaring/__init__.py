"""What a user says of an ingestion."""
