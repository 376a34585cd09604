"""One file per architecture; `registry` finds it by the name in config.json."""
