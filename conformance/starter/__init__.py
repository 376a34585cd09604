"""The starter model through the engine, against what transformers makes of it."""
