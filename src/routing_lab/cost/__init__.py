"""What a routed model costs: multiply-accumulates (`macs`, torch-free) and what is read off a model (`measure`)."""
