"""Benchmarks of the engine; each is a subcommand of `python -m engine.bench`."""
