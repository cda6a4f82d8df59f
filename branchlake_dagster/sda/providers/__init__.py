"""Download catalogs from CelesTrak and Space-Track, within the limits of their usage policies."""
