"""Keys, request ids, metrics, CORS, root path and errors around the routes: SEC-01, SEC-07, SEC-08, MET-01."""

from __future__ import annotations

import random
import re
import string
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from engine.api import EngineState
from tests.server.calls import CHAT, COMPLETIONS, app_of, error_of, get, post, run, send, strict_json
from tests.server.fake_client import FakeClient

BODY = {"model": "M", "prompt": "x", "max_tokens": 1}
OPEN = {"/health"}


def routes_of(app: Starlette) -> list[tuple[str, str]]:
    """Every method and path of the app's own table, with something in place of parameters."""
    table = []
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is not covered by this walk"
        assert route.methods is not None
        table += [(method, re.sub(r"\{[^}]*\}", "M", route.path)) for method in sorted(route.methods)]
    return table


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([], id="none"),
        pytest.param([("Authorization", "Bearer wrong")], id="wrong"),
        pytest.param([("Authorization", "Bearer")], id="no-token"),
        pytest.param([("Authorization", "Bearer ")], id="empty-token"),
        pytest.param([("Authorization", "secret")], id="no-scheme"),
        pytest.param([("Authorization", "Basic secret")], id="basic"),
        pytest.param([("Authorization", "Bearersecret")], id="glued"),
        pytest.param([("Authorization", "Bearer secret"), ("Authorization", "Bearer secret")], id="two"),
        pytest.param([("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")], id="wrong-then-right"),
        pytest.param([("X-Api-Key", "secret")], id="other-header"),
        pytest.param([("Authorization", "Bearer sécret".encode())], id="non-ascii"),
    ],
)
def test_every_route_asks_for_the_key_sec_01(headers: list[Any]) -> None:
    client = FakeClient()
    app = app_of(client, api_keys=("other", "secret"))
    table = routes_of(app)
    assert len(table) >= 9
    unknown = [
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/embeddings"),
        ("FOO", "/health2"),
    ]

    async def work() -> None:
        for method, path in [*table, *unknown]:
            if path in OPEN:
                assert (await send(app, method, path, headers=headers)).status_code == 200
                continue
            response = await send(app, method, f"{path}?api_key=secret&key=secret", headers=headers)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert error_of(response, 401)["code"] == "invalid_api_key"
            assert "secret" not in response.text

    run(work())
    assert client.requests == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", ["other", "secret"])
def test_right_key_sec_01(scheme: str, key: str) -> None:
    app = app_of(api_keys=("other", "secret"))
    strict_json(post(app, COMPLETIONS, BODY, headers={"Authorization": f"{scheme} {key}"}))


def test_health_is_matched_exactly_sec_01() -> None:
    app = app_of(api_keys=("secret",), root_path="/pre")
    for path in ("/health/", "//health", "/health/x", "/Health", "/pre/pre/health", "/x/health", "/health%2f"):
        assert get(app, path).status_code == 401, path
    assert get(app, "/pre/health").status_code == 200


def test_key_is_not_in_logs_or_metrics_sec_01(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    app = app_of(FakeClient(failure=ValueError("boom")), api_keys=("secret",))
    headers = {"Authorization": "Bearer secret"}
    error_of(post(app, COMPLETIONS, BODY, headers=headers), 500)
    assert "secret" not in get(app, "/metrics", headers=headers).text
    assert "boom" in caplog.text
    assert "secret" not in caplog.text


def test_websockets_are_closed_sec_01() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "query_string": b"", "root_path": ""}
    run(app_of()(scope, receive, keep))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_options_gives_no_data_without_a_key_sec_01_sec_07() -> None:
    app = app_of(api_keys=("secret",))
    response = run(send(app, "OPTIONS", "/v1/models"))
    assert error_of(response, 405)["code"] == "method_not_allowed"


def test_no_cors_by_default_sec_07() -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for response in (
        run(send(app_of(), "OPTIONS", COMPLETIONS, headers=headers)),
        post(app_of(), COMPLETIONS, BODY, headers=headers),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [("*",), ("https://a",), ("*", "https://a")])
def test_cors_never_with_credentials_sec_07(origins: tuple[str, ...]) -> None:
    app = app_of(allowed_origins=origins, api_keys=("secret",))
    for origin in ("https://a", "https://evil.example"):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for response in (
            run(send(app, "OPTIONS", COMPLETIONS, headers=headers)),
            post(app, COMPLETIONS, BODY, headers=headers),
        ):
            assert "access-control-allow-credentials" not in response.headers
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == ("*" if "*" in origins else {"https://a": "https://a"}.get(origin))
    assert post(app, COMPLETIONS, BODY, headers={"Origin": "https://a"}).status_code == 401


@pytest.mark.parametrize("asked", ["a", "A-z0.9_", "x" * 128])
def test_plain_request_id_is_echoed_sec_08(asked: str) -> None:
    for response in (
        get(app_of(), "/health", headers={"X-Request-Id": asked}),
        get(app_of(), "/nope", headers={"X-Request-Id": asked}),
        post(app_of(FakeClient(failure=ValueError())), COMPLETIONS, BODY, headers={"X-Request-Id": asked}),
        post(app_of(api_keys=("k",)), COMPLETIONS, BODY, headers={"X-Request-Id": asked}),
    ):
        assert response.headers.get_list("x-request-id") == [asked]


@pytest.mark.parametrize("asked", ["", "x" * 129, "x" * 1_000_000, "a\tb", "a\x1b[2J", "a%0d%0aX-Evil: 1", b"\xff\xfe"])
def test_odd_request_id_is_replaced_sec_08(asked: Any) -> None:
    first = get(app_of(), "/health", headers={"X-Request-Id": asked})
    second = get(app_of(), "/health")
    for response in (first, second):
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_request_id_of_a_client_never_names_an_engine_request() -> None:
    client = FakeClient()
    app = app_of(client)
    for _ in range(2):
        post(app, COMPLETIONS, {**BODY, "prompt": ["a", "b"]}, headers={"X-Request-Id": "same"})
    names = [request.request_id for request in client.requests]
    assert len(set(names)) == 4
    assert not any("same" in name for name in names)


def series(app: Starlette) -> set[str]:
    lines = get(app, "/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line.startswith("http_requests_total")}


def test_series_do_not_grow_with_paths_met_01() -> None:
    app = app_of()
    chance = random.Random(1)

    def word() -> str:
        return "".join(chance.choices(string.ascii_letters + '"\\{}', k=12))

    async def visit(count: int) -> None:
        for i in range(count):
            paths = (f"/{word()}", f"/v1/models/{word()}", f"/{word()}?q={word()}", "/" + "x" * 1000)
            await send(app, ("GET", "FOO", "PUT", f"M{i}")[i % 4], paths[i // 4 % 4])

    run(visit(64))
    get(app, "/metrics")
    before = series(app)
    run(visit(320))
    assert series(app) == before
    assert 'http_requests_total{method="GET",path="unmatched",status="404"}' in before
    assert 'http_requests_total{method="GET",path="/v1/models/{id:path}",status="404"}' in before
    assert 'http_requests_total{method="other",path="unmatched",status="404"}' in before


def test_counts_by_template_and_status_met_01() -> None:
    app = app_of()
    post(app, COMPLETIONS, BODY)
    post(app, COMPLETIONS, {**BODY, "stream": True})
    post(app, COMPLETIONS, {**BODY, "n": 0})
    get(app, COMPLETIONS)
    get(app, "/v1/models/M")
    response = get(app, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        'http_requests_total{method="POST",path="/v1/completions",status="200"} 2.0',
        'http_requests_total{method="POST",path="/v1/completions",status="400"} 1.0',
        'http_requests_total{method="GET",path="/v1/completions",status="405"} 1.0',
        'http_requests_total{method="GET",path="/v1/models/{id:path}",status="200"} 1.0',
        "fake_engine 1.0",
    ):
        assert line in lines


def test_two_apps_count_apart() -> None:
    first, second = app_of(), app_of()
    get(first, "/version")
    assert not any("/version" in name for name in series(second))


@pytest.mark.parametrize("root_path", ["/api/v9", "api/v9/"])
def test_root_path(root_path: str) -> None:
    app = app_of(root_path=root_path)
    for path in (COMPLETIONS, "/api/v9" + COMPLETIONS):
        strict_json(post(app, path, BODY))
    for path in ("/api/v9", "/api/v99/health", "/api/health"):
        error_of(get(app, path), 404)
    assert 'path="/v1/completions",status="200"} 2.0' in get(app, "/api/v9/metrics").text


def test_unknown_path_and_wrong_method_have_the_error_shape() -> None:
    for path in ("/nope", "/v1", "/v1/chat/completions/", "/v1/models/nope"):
        error_of(get(app_of(), path), 404)
    response = get(app_of(), CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(post(app_of(), "/health", {}), 405)


@pytest.mark.parametrize("phase", ["starting", "draining", "dead"])
def test_not_ready_is_a_503_with_a_hint(phase: Any) -> None:
    client = FakeClient(engine_state=EngineState(phase, "rank 3 is gone"))
    app = app_of(client)
    responses = [get(app, "/health")]
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        responses.append(post(app, path, {**BODY, "messages": [], "stream": True}))
    for response in responses:
        error = error_of(response, 503)
        assert error["code"] == f"engine_{phase}"
        assert error["message"] == f"the engine is {phase}: rank 3 is gone"
        assert int(response.headers["retry-after"]) > 0
    assert get(app, "/v1/models").status_code == 200
    assert client.requests == []


def test_ready_is_a_plain_200() -> None:
    response = get(app_of(), "/health")
    assert (response.status_code, response.content) == (200, b"")
    assert run(send(app_of(), "HEAD", "/health")).status_code == 200


def test_unexpected_failure_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(failure=KeyError("/home/me/secret"))
    error = error_of(post(app_of(client), COMPLETIONS, BODY, headers={"X-Request-Id": "r7"}), 500)
    assert (error["code"], error["param"]) == ("internal_error", None)
    assert "secret" not in str(error)
    assert "request r7 failed" in caplog.text
