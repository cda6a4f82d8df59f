"""How an asset is given the changes it consumes, as frames, and how its result takes their place."""
