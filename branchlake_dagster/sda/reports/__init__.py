"""Draw pictures and format tables of results for operators."""
