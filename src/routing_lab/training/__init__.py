"""Training one cell: its weights, the run itself, the costs, what a person and a tracker see of it.

Nothing is imported here.
"""
