"""Hard cases of the engine as a whole, on any machine that can serve."""
