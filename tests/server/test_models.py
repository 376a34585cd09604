"""GET /v1/models, /version, POST /tokenize and /detokenize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.api import EngineState, ModelInfo
from engine.errors import EngineDeadError
from tests.server.calls import app_of, error_of, get, post, strict_json
from tests.server.fake_client import CONTEXT, FakeClient, ids_of

CARD = {
    "id": "M",
    "object": "model",
    "created": 1700000000,
    "owned_by": "glint",
    "root": "tiny",
    "parent": None,
    "max_model_len": CONTEXT,
    "permission": [],
}


def test_models() -> None:
    answer = strict_json(get(app_of(), "/v1/models"))
    assert answer == {"object": "list", "data": [CARD, {**CARD, "id": "alias/of-M"}]}
    assert strict_json(get(app_of(), "/v1/models/M")) == CARD
    assert strict_json(get(app_of(), "/v1/models/alias/of-M")) == {**CARD, "id": "alias/of-M"}
    assert error_of(get(app_of(), "/v1/models/other"), 404)["code"] == "model_not_found"


class LoadingClient(FakeClient):
    """Knows no model yet."""

    @property
    def model(self) -> ModelInfo:
        raise EngineDeadError("weights are being read")


def test_models_before_the_model_is_known() -> None:
    client = LoadingClient(engine_state=EngineState("starting"))
    for path in ("/v1/models", "/v1/models/M", "/health"):
        assert "retry-after" in get(app_of(client), path).headers
        error_of(get(app_of(client), path), 503)
    assert get(app_of(client), "/metrics").status_code == 200


def test_version() -> None:
    assert strict_json(get(app_of(version="1.2.3"), "/version")) == {"version": "1.2.3"}


class AboutClient(FakeClient):
    @property
    def model(self) -> ModelInfo:
        return replace(super().model, about={"device": "abacus", "flags": {"seed": 3}})


def test_version_says_what_computes_and_with_which_flags() -> None:
    """Once there is a model, and to those with a key."""
    said = {"version": "1.2.3", "device": "abacus", "flags": {"seed": 3}}
    assert strict_json(get(app_of(AboutClient(), version="1.2.3"), "/version")) == said
    assert strict_json(get(app_of(LoadingClient(), version="1.2.3"), "/version")) == {"version": "1.2.3"}
    assert get(app_of(AboutClient(), api_keys=("k",)), "/version").status_code == 401


@pytest.mark.parametrize(
    ("add", "ids"), [(None, [0, *ids_of("hé")]), (True, [0, *ids_of("hé")]), (False, ids_of("hé"))]
)
def test_tokenize_text(add: bool | None, ids: list[int]) -> None:
    body = {"model": "M", "prompt": "hé", "add_special_tokens": add, "return_token_strs": True}
    answer = strict_json(post(app_of(FakeClient(add_bos=True)), "/tokenize", body))
    strings = [f"<{token_id}>" for token_id in ids]
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": strings}


def test_tokenize_messages() -> None:
    client = FakeClient()
    body = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    answer = strict_json(post(app_of(client), "/tokenize", body))
    assert (answer["tokens"], answer["token_strs"]) == (ids_of("u:x;"), None)
    assert client.rendered[0]["add_generation_prompt"] is False


def test_tokenize_takes_more_than_the_context() -> None:
    assert strict_json(post(app_of(), "/tokenize", {"prompt": "x" * 1000}))["count"] == 1000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [300]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_refused(path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(post(app_of(), path, body), 400)["param"] == param


def test_unknown_model_is_refused_everywhere() -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert error_of(post(app_of(), path, {**body, "model": "other"}), 404)["code"] == "model_not_found"


def test_detokenize() -> None:
    assert strict_json(post(app_of(), "/detokenize", {"tokens": ids_of("hé")})) == {"prompt": "hé"}
    assert strict_json(post(app_of(), "/detokenize", {"tokens": []})) == {"prompt": ""}
