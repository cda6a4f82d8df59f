"""Associate sensor observations with catalog objects."""
