"""Texts, their tokens and their windows.

`schema` and `inspect` load without torch.
"""
