"""Two ways to call the app in a test: whole requests over httpx, and bare ASGI where the connection itself matters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette

from server.app import create_app
from server.settings import ServerSettings
from tests.server.fake_client import FakeClient

T = TypeVar("T")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def app_of(client: FakeClient | None = None, **settings: Any) -> Starlette:
    return create_app(client or FakeClient(), ServerSettings(**settings))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def send(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", trust_env=False) as http:
        return await http.request(method, path, **options)


def post(app: Starlette, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """One POST; body is JSON unless content is given."""
    if "content" in options:
        options.setdefault("headers", {"content-type": "application/json"})
    else:
        options["json"] = body
    return run(send(app, "POST", path, **options))


def get(app: Starlette, path: str, **options: Any) -> httpx.Response:
    return run(send(app, "GET", path, **options))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after a check of its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    for secret in ("Traceback", ".py", "site-packages"):
        assert secret not in response.text
    return error


def events_of(text: str) -> list[Any]:
    """The JSON of each event of a stream; checks that every event is one line and the last is [DONE]."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(block[len("data: ") :], parse_constant=_no_constant) for block in blocks[:-1]]


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} in JSON")


def strict_json(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=_no_constant)


def stream(app: Starlette, path: str, body: dict[str, Any]) -> list[Any]:
    response = post(app, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream of either endpoint."""
    entries = [entry for event in events for entry in event["choices"] if entry["index"] == index]
    return "".join((entry["delta"].get("content") or "") if "delta" in entry else entry["text"] for entry in entries)


class Connection:
    """One raw ASGI exchange whose client can leave at any moment and may read slowly."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._app = app
        data = json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.incoming: list[dict[str, Any]] = [{"type": "http.request", "body": data, "more_body": False}]
        self._left = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.messages: list[dict[str, Any]] = []
        self.on_message: Callable[[dict[str, Any]], Awaitable[None]] | None = None

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.messages if m["type"] == "http.response.start"), None)

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.messages if m["type"] == "http.response.body").decode()

    async def _receive(self) -> dict[str, Any]:
        if self.incoming:
            return self.incoming.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.may_read.wait()
        self.messages.append(message)
        if self.on_message is not None:
            await self.on_message(message)
