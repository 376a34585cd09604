"""The production engine. Empty on purpose: `import engine.api` must load nothing heavy."""
