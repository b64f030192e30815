"""A fair comparison of optimizers: the same weights and tokens, tuned rates, several seeds."""
