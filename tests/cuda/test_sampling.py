"""Sampling kernels on this CPU, against ref, on rows that are hard to rank."""
