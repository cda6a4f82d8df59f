"""Where catalogs are fetched from: CelesTrak and Space-Track, within the limits that they ask of users."""
