"""What changed in a table between two of its states, from its metadata and manifests alone: no JVM."""
