"""config.json and generation_config.json become a ModelConfig; read is the entry, families knows each architecture."""
