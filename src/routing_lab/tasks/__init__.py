"""What a model is trained for: Lightning modules that hold the objective, the optimiser and the measurements.

Nothing is imported here.
"""
