"""The HTTP surface. It knows the engine only through engine.api, so it runs against any EngineClient."""
