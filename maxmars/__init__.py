"""maxmars: pretrain GPT-2 with variance-reduced optimizers in JAX.

Importing the package imports nothing heavy; take what you need from its modules, for example
`from maxmars.optim import mars` in any optax program.
"""

__version__ = "0.2.0"
