"""What an operator can set about the HTTP side; built once by whoever starts the server."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field


def installed_version() -> str:
    """The version of the installed distribution, or "unknown" when run from a plain checkout."""
    try:
        return importlib.metadata.version("glint-llm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the HTTP side. Times in seconds, sizes in bytes."""

    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    root_path: str = ""  # prefix of a proxy; every route answers with and without it
    allowed_origins: tuple[str, ...] = ()  # CORS; never with credentials
    max_body_bytes: int = 4 * 1024 * 1024
    max_choices: int = 256  # prompts of one request times n
    read_timeout_s: float = 60.0  # for the whole body
    write_timeout_s: float = 60.0  # for one piece of a stream; then the reader is cut off and its request aborted
    sse_ping_s: float = 15.0  # silence in a stream after which a comment is sent
    version: str = field(default_factory=installed_version)
