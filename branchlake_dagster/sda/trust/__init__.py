"""How far element sets can be trusted: their error against age, jumps, covariance and probability."""
