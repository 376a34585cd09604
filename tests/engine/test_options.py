"""engine.options, engine.env and EngineConfig.validate: what is accepted, and what a refusal says."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine import options
from engine.config import EngineConfig
from engine.env import Environment, read_environment
from engine.errors import ConfigError
from engine.option_table import OPTIONS
from engine.options import config_from_keywords, parse_args
from engine.vllm_flags import LACKING

README = Path(__file__).parents[2] / "README.md"


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    return str(caught.value)


def test_no_arguments_are_the_defaults() -> None:
    assert parse_args([]) == EngineConfig()


def test_every_field_has_a_flag() -> None:
    assert {f.name for f in fields(EngineConfig)} == {option.name for option in OPTIONS if option.is_field}


def test_spellings_are_unique_and_none_is_called_lacking() -> None:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    assert len(spellings) == len(set(spellings))
    assert not {spelling.lstrip("-") for spelling in spellings} & LACKING.keys()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--model dir --host 0.0.0.0 --port 80", {"model": "dir", "host": "0.0.0.0", "port": 80}),
        ("--served-model-name a b --port 81", {"served_model_name": ("a", "b"), "port": 81}),
        ("--api-key x --api-key y z", {"api_key": ("x", "y", "z")}),
        ("--max-model-len 4k", {"max_model_len": 4000}),
        ("--max-model-len=4K", {"max_model_len": 4096}),
        ("--max_model_len 25.6k", {"max_model_len": 25600}),
        ("--num-gpu-blocks-override 2M", {"num_gpu_blocks_override": 2097152}),
        ("--enable-prefix-caching", {}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--max-num-seqs 8 --max_num_batched_tokens=64", {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
        ("--max-queued-requests 5 --shutdown-timeout 0.5", {"max_waiting": 5, "shutdown_grace_s": 0.5}),
        ("--device cpu --dtype float32 --load-format dummy --seed 7", {"device": "cpu", "dtype": "float32"}),
        ("--kv-cache-dtype auto --dual-stream off --allreduce auto --enable-chunked-prefill", {"dual_stream": "off"}),
        ("-tp 1 -pp 2", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
        ("--tensor-parallel 8 --pipeline-parallel=1", {"tensor_parallel_size": 8, "pipeline_parallel_size": 1}),
        ("--gpu-memory-utilization 1 --reserve-memory-mb 2000", {"reserve_memory_mb": 2000}),
        ("--split memory", {"split": "memory"}),
        ("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8", "kv_codes": "fp8"}),
        ("--kv_cache_dtype=fp8_e4m3", {"kv_codes": "fp8"}),
        ("--kv-cache-dtype int8", {"kv_codes": "int8"}),
        ("--kv-cache-dtype auto", {"kv_codes": None}),
        ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--root-path /api --chat-template t.jinja --max-logprobs 0", {"root_path": "/api", "max_logprobs": 0}),
    ],
)
def test_accepted(argv: str, expected: dict[str, Any]) -> None:
    config = parse_args(argv.split())
    assert {name: getattr(config, name) for name in expected} == expected
    if not expected:
        assert config == EngineConfig()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--port x", "--port cannot be 'x': it must be an integer"),
        ("--port 65536", "--port is 65536; it must be 0 to 65535"),
        ("--port", "--port: expected one argument"),
        ("--max-model-len 4.5", "--max-model-len cannot be '4.5'"),
        ("--max-model-len 1", "--max-model-len is 1; it must be 2 to 268435456"),
        ("--shutdown-grace-s nan", "--shutdown-grace-s is nan"),
        ("--shutdown-grace-s soon", "--shutdown-grace-s cannot be 'soon': it must be a number"),
        ("--device tpu", "--device is 'tpu'; it must be one of auto, cuda, cpu"),
        ("--dtype float8", "--dtype is 'float8'; it must be one of"),
        ("--max-num-batched-tokens 8 --max-num-seqs 9", "--max-num-batched-tokens is 8, below max_num_seqs 9"),
        ("--root-path api/", "--root-path is 'api/'"),
        ("-tp 0", "--tensor-parallel-size is 0; it must be 1 to 4096"),
        ("--pipeline-parallel 5000", "--pipeline-parallel-size is 5000; it must be 1 to 4096"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype is 'fp8_e5m2'; it must be one of auto, fp8, fp8_e4m3, int8"),
        ("--gpu-memory-utilization 1.5", "must be a share above 0 and at most 1"),
        ("--reserve-memory-mb -1", "--reserve-memory-mb is -1; it must be 0 to 16777216"),
        ("--split 1,2", "--split is '1,2'; it must be one of even, memory"),
        ("--allreduce smoke", "--allreduce is 'smoke'; it must be one of auto, float32"),
        ("--dual-stream both", "--dual-stream is 'both'; it must be one of auto, on, off"),
        ("--tool-call-parser hermes", "--tool-call-parser hermes is not served yet"),
        ("--reasoning-parser qwen3", "--reasoning-parser qwen3 is not served yet"),
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill off is not served yet"),
        ("--enforce-eager", "--enforce-eager is a vLLM flag that Glint does not have"),
        ("--quantization=awq", "--quantization is a vLLM flag that Glint does not have"),
        ("--trust_remote_code", "--trust-remote-code is a vLLM flag that Glint does not have: no code"),
        ("--no-async-scheduling", "--no-async-scheduling is a vLLM flag that Glint does not have"),
        ("--swap-space 4 --tokenizer x", "--tokenizer is a vLLM flag that Glint does not have"),
        ("--prot 80", "--prot is not a flag; did you mean --port?"),
        ("--max-model-length 80", "did you mean --max-model-len?"),
        ("--num-threads 1000000", "--num-threads is 1000000; it must be 1 to 1024"),
        ("--num-gpu-blocks-override 1000000000", "--num-gpu-blocks-override is 1000000000; it must be 1 to 16777216"),
        ("--max-num-batched-tokens 1000000000", "--max-num-batched-tokens is 1000000000; it must be 1 to 16777216"),
        ("--max-num-seqs 1000000000", "--max-num-seqs is 1000000000; it must be 1 to 65536"),
        ("--max-logprobs 99999999999999999999", "--max-logprobs is 99999999999999999999; it must be 0 to"),
        ("--zzzzzzzz", "--zzzzzzzz is not a flag; --help lists the flags"),
        ("some/model", "a model is given by --model some/model"),
        ("--max-num 8", "--max-num is not a flag"),
    ],
)
def test_refused(argv: str, says: str) -> None:
    assert says in refusal(*argv.split())


def test_all_problems_are_listed_at_once() -> None:
    lines = refusal("--port", "x", "-tp", "0", "--enforce-eager", "--seeed", "1").splitlines()
    assert [line.split()[0] for line in lines] == ["--enforce-eager", "--seeed", "--port", "--tensor-parallel-size"]
    lines = refusal("--port", "-1", "--device", "x", "--max-waiting", "0").splitlines()
    assert [line.split()[0] for line in lines] == ["--port", "--max-waiting", "--device"]


def test_help_prints_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for option in OPTIONS:
        assert all(spelling in printed for spelling in option.spellings)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_config_file(tmp_path: Path, suffix: str) -> None:
    """Keys are flags without dashes, in any spelling; the command line wins."""
    path = tmp_path / f"glint.{suffix}"
    path.write_text(
        {
            "json": '{"model": "m", "max-model-len": "4k", "max_num_seqs": 8, "served-model-name": ["a", "b"],'
            ' "enable-prefix-caching": false, "tp": 1, "api-key": "k", "shutdown-timeout": 2}',
            "toml": 'model = "m"\nmax-model-len = "4k"\nmax_num_seqs = 8\nserved-model-name = ["a", "b"]\n'
            'enable-prefix-caching = false\ntp = 1\napi-key = "k"\nshutdown-timeout = 2\n',
        }[suffix]
    )
    expected = EngineConfig(
        model="m",
        max_model_len=4000,
        max_num_seqs=8,
        served_model_name=("a", "b"),
        enable_prefix_caching=False,
        api_key=("k",),
        shutdown_grace_s=2.0,
        tensor_parallel_size=1,
    )
    assert parse_args(["--config", str(path)]) == expected
    argv = ["--max-num-seqs", "9", "--config", str(path), "--enable-prefix-caching", "--served-model-name", "c"]
    assert parse_args(argv) == replace(expected, max_num_seqs=9, enable_prefix_caching=True, served_model_name=("c",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"max-modellen": 5}, "--max-modellen is not a flag; did you mean --max-model-len? (key 'max-modellen' in"),
        ({"enforce_eager": True}, "--enforce-eager is a vLLM flag that Glint does not have"),
        ({"config": "other.json"}, "a config file cannot name another"),
        ({"port": 1, "PORT": 1}, "--PORT is not a flag"),
        ({"max-num-seqs": 8, "max_num_seqs": 8}, "--max-num-seqs is given twice"),
        ({"port": "x"}, "cannot be 'x'"),
        ({"port": None}, "cannot be None"),
        ({"port": 1.5}, "cannot be 1.5"),
        ({"port": True}, "cannot be True"),
        ({"model": 5}, "it must be a text"),
        ({"enable-prefix-caching": "yes"}, "it must be true or false"),
        ({"tensor-parallel-size": "x"}, "--tensor-parallel-size in"),
        ({"port": 70000}, "--port is 70000"),
        ([1], "must hold one table of flags, not list"),
    ],
)
def test_config_file_refused(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "glint.json"
    path.write_text(json.dumps(content))
    assert says in refusal("--config", str(path))


def test_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal("--config", str(tmp_path / "none.json"))
    assert "YAML is not read" in refusal("--config", str(tmp_path / "glint.yaml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("port = ")
    assert "is not valid TOML" in refusal("--config", str(broken))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"model": "\xff"}')
    assert "is not valid JSON" in refusal("--config", str(binary))


def test_api_keys_stay_out_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "glint.json"
    path.write_text('{"api-key": {"a": "sesame"}}')
    assert "sesame" not in refusal("--config", str(path))
    assert "sesame" not in repr(parse_args(["--api-key", "sesame"]))


def test_all_problems_of_a_config_are_found() -> None:
    """Wrong types too, each named by its field."""
    config = EngineConfig(max_num_seqs="8", seed=True, num_threads=0, model="", api_key=("",), host="")  # type: ignore[arg-type]
    named = [name for name, _ in config.problems()]
    assert named == ["seed", "max_num_seqs", "num_threads", "model", "api_key", "host"]
    assert EngineConfig().problems() == []


def test_readme_has_this_very_table() -> None:
    """`python -m engine.options` prints what belongs between the markers."""
    table = options.markdown_table()
    for option in OPTIONS:
        assert f"`{option.flag}`" in table
    begin, end = "<!-- flags -->", "<!-- /flags -->"
    readme = README.read_text(encoding="utf-8") if README.exists() else ""
    if begin in readme:
        assert readme.split(begin)[1].split(end)[0].strip() == table.strip()


def test_environment() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"GLINT_LOG_LEVEL": "", "GLINT_PORT": "tcp://10.0.0.1:80"}) == Environment()
    found = read_environment({"GLINT_LOG_LEVEL": "debug", "GLINT_API_KEY": "a, b"})
    assert found == Environment(log_level="DEBUG", api_key=("a", "b"))


def test_environment_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({"GLINT_LOG_LEVEL": "loud", "GLINT_API_KEY": "sesame,,"})
    lines = str(caught.value).splitlines()
    assert "GLINT_LOG_LEVEL is 'loud'; it must be one of DEBUG, INFO, WARNING, ERROR" in lines[0]
    assert "GLINT_API_KEY has an empty key" in lines[1]
    assert "sesame" not in lines[1]


def test_keywords_of_python_callers() -> None:
    """The names of the flags, with the same checks; what is no option is named, with the nearest that is."""
    config = config_from_keywords(model="dir", max_model_len="4k", tensor_parallel_size=1, served_model_name="one")
    assert (config.model, config.max_model_len, config.served_model_name) == ("dir", 4000, ("one",))
    with pytest.raises(ConfigError) as caught:
        config_from_keywords(model="dir", max_waitin=1, tensor_parallel_size=0, block_size=0)
    said = str(caught.value).splitlines()
    assert len(said) == 3
    assert "did you mean max_waiting" in said[0]
    assert said[1].startswith("--block-size")
    assert said[2].startswith("--tensor-parallel-size is 0")


def test_a_value_that_cannot_be_read_hides_no_other_problem() -> None:
    said = refusal("--port", "abc", "--block-size", "0", "--dtype", "fp8", "--foo").splitlines()
    assert [line.split()[0] for line in said] == ["--foo", "--port", "--block-size", "--dtype"]


def test_the_flags_of_another_command_are_suggested_too() -> None:
    with pytest.raises(ConfigError, match="did you mean --temperature"):
        parse_args(["--temprature", "0"], other_flags=["--temperature"])
