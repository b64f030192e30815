"""Checks that config classes share; each raises one clear ValueError."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive(config: object, *names: str) -> None:
    """Require the named fields to be None or greater than zero."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{type(config).__name__}.{name}={value} must be greater than zero.")


def require_fraction(config: object, *names: str) -> None:
    """Require the named fields to lie in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"{type(config).__name__}.{name}={value} must lie in [0, 1).")


def require_not_negative(config: object, *names: str) -> None:
    """Require the named fields to be None, zero or greater."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{type(config).__name__}.{name}={value} must not be negative.")
