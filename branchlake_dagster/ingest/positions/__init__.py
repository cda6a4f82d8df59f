"""How far each table has come in each topic: recorded with the rows, found again, and what is next."""
