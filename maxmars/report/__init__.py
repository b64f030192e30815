"""Curves, figures and a page of finished runs; needs no JAX."""
