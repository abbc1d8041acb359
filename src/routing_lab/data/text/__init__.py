"""Texts, their tokens and their windows.

`schema` and `inspect` load without torch.
"""

IGNORED = -100
"""Target of a token whose successor does not count."""
