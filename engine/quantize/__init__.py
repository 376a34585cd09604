"""`python -m engine.quantize`: a checkpoint in a number format of 4 or 8 bits, made from one in floating point."""
