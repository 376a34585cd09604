"""The kinds of machine that an engine is built for. engine.build picks one by name and imports no other."""
