"""The kinds of machine that an engine is built for. engine.backends.choose picks one by name and imports no other."""
