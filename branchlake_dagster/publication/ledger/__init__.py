"""What was published: `main`'s log in Nessie, and what is on its way there."""
