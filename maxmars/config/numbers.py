"""Numbers and durations as short texts for people.

Numbers are rounded before their magnitude is chosen, so that no text is longer than its column:
999,600 is 1.00M, not 1000k. Files for programs get the numbers themselves.
"""

from __future__ import annotations


def short(number: int | float) -> str:
    """A number with three digits and its magnitude, up to exa: 987, 12.3k, 1.23M."""
    for power, suffix in zip(range(18, 0, -3), "EPTGMk", strict=True):
        if number >= 10**power * 0.9995:  # what rounds to 1.00
            scaled = number / 10**power
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A duration in seconds as text: 0:07, 12:34, 1:02:03 or 2d 03h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
