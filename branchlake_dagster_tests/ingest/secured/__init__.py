"""A broker that asks who one is, and that shows a certificate."""
