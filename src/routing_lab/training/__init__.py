"""Training one cell: schema, run folder, the run itself, tracking.

Nothing is imported here: `training.schema` and `training.store` are read by commands that must start without torch.
"""
