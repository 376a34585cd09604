"""`mpirun -n 8 python -m engine.serve`, exactly so but for the port, with the starter model: 9 heads on 8 ranks."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from conformance.starter.follow import GOLDEN
from engine.checkpoint.source import ModelSource
from engine.checkpoint.text import load_text
from tests.serve.servers import MPIRUN, ROOT, Server


@pytest.mark.starter
def test_eight_ranks_answer_as_transformers_does(starter_model: ModelSource) -> None:
    tokenizer, _ = load_text(starter_model, vocab_size=49152)
    assert tokenizer is not None
    (golden,) = [entry for entry in GOLDEN if entry["name"] == "chat_capital"]
    command = [MPIRUN, "-n", "8", sys.executable, "-m", "engine.serve", "--port", "0"]
    server = Server(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    try:
        server.wait_until_ready()
        body = {"prompt": golden["prompt_ids"], "max_tokens": len(golden["greedy_ids"]), "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        expected = tokenizer.decode(golden["greedy_ids"][:-1])  # the last is the end
        assert reply.json()["choices"][0]["text"].strip() == expected.strip()
        assert "8 ranks: tensor parallel 8, pipeline parallel 1" in "".join(server.lines)
        assert server.stop() == 0
    finally:
        server.kill()
