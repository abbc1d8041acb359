"""The one home of a run folder: its path and lock, its record, history and predictions, and how files are written.

Nothing is imported here, and nothing in this package needs torch; `routing_lab.open_run` makes the model of a folder.
"""
