"""The laws of imports: one direction, no cycles, nothing hidden in a function, and nothing heavy at run time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ref", "engine", "server", "conformance")

# A module of engine imports from its own line and from lines above it. A package stands for all that is in it, unless
# a module of it has a line of its own.
LAYERS = (
    ("engine", "engine.errors", "engine.system", "engine.numa", "engine.log", "engine.progress"),
    ("engine.sampling_params", "engine.memory_plan", "engine.packed4", "engine.coded_kv", "engine.coded8"),
    ("engine.api", "engine.config", "engine.weights", "engine.env", "engine.stats", "engine.messages"),
    ("engine.sequence", "engine.blocks", "engine.batch", "engine.swap"),
    ("engine.scheduler", "engine.faults", "engine.prefix_lm", "engine.halves"),
    ("engine.logit_edits",),
    ("engine.token_bytes", "engine.gguf_tokenizer", "engine.tokenizer", "engine.detokenizer", "engine.text"),
    ("engine.template_limits", "engine.template_sandbox", "engine.chat_template"),
    ("engine.vllm_flags", "engine.option_values", "engine.option_table", "engine.options"),
    ("engine.model_config.fields",),
    (
        "engine.model_config.rope",
        "engine.model_config.moe",
        "engine.model_config.dense",
        "engine.model_config.mla",
        "engine.model_config.families",
    ),
    ("engine.model_config",),
    ("engine.cpu", "engine.kernels", "engine.ops", "engine.rope_table"),
    ("engine.kv_cache", "engine.models.model", "engine.comm"),
    ("engine.models", "engine.checkpoint"),
    ("engine.split_sizes",),
    ("engine.split",),
    ("engine.choose_split",),
    ("engine.forward",),
    ("engine.checked_forward",),
    (
        "engine.sampler",
        "engine.runner",
        "engine.memory",
        "engine.gpu_memory",
        "engine.kernels.forward",
        "engine.kernels.graphs",
        "engine.kernels.store",
        "engine.kernels.dry_load",
        "engine.kernels.dry_run",
        "engine.kernels.resources",
        "engine.kernels.__main__",
    ),
    ("engine.backends",),
    ("engine.about", "engine.admission", "engine.rank_checks"),
    ("engine.in_flight", "engine.slots", "engine.follow"),
    ("engine.loop",),
    ("engine.build",),
    (
        "engine.llm",
        "engine.metrics",
        "engine.client",
        "engine.front_end",
        "engine.http_protocol",
        "engine.http_process",
    ),
    ("engine.quantize",),
    ("engine.serve", "engine.generate", "engine.bench"),
)
ORACLE = (
    "conformance.regenerate",
    "conformance.oracle_formats",
    "conformance.peers",
)  # run by hand with an extra; may import torch, nobody imports them
HTTP_PROCESS = ("engine.http_process", "engine.http_protocol")
NOT_AT_RUN_TIME = ("torch", "transformers", "jax")
KERNELS = "engine.kernels"
GPU = (  # these alone import cupy
    "engine.backends.cuda",
    *(
        f"engine.comm.{name}"
        for name in ("bench_ways", "copies", "host_window", "join", "links", "nccl", "peer", "planner")
    ),
    *(
        f"{KERNELS}.{name}"
        for name in (
            "gpu",
            "compile",
            "cublas",
            "forward",
            "graphs",
            "pools",
            "resources",
            "side_stream",
            "store",
            "__main__",
        )
    ),
)
OWN_MODULES = {  # third-party packages that are kept behind a few modules
    "tokenizers": {"engine.tokenizer", "engine.gguf_tokenizer", "ref.__main__"},
    "jinja2": {"engine.chat_template", "engine.template_sandbox", "engine.template_limits"},
    "huggingface_hub": {"engine.checkpoint.source"},
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the four packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules that a piece of code imports, and on which line; `from a import b` is a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if full in modules() else module, node.lineno)


@cache
def edges() -> list[tuple[str, int, str]]:
    """(module, line, module that it imports there) of all four packages."""
    return [(name, line, target) for name, tree in modules().items() for target, line in imports(tree)]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer(name: str) -> int:
    """Index in LAYERS of a module, by the longest entry that it is within."""
    entries = [(entry, index) for index, entries in enumerate(LAYERS) for entry in entries]
    fitting = [
        (len(entry), index) for entry, index in entries if name == entry or (entry != "engine" and within(name, entry))
    ]
    assert fitting, f"{name} has no place in LAYERS: add it to the line above which it imports nothing"
    return max(fitting)[1]


def broken(rule: str) -> list[str]:
    """What breaks a rule, as lines "file imports module"."""
    return [f"{name}:{line} imports {target}" for name, line, target in edges() if RULES[rule](name, target)]


def is_outside_ref(name: str, target: str) -> bool:
    top = target.split(".")[0]
    allowed = {"ref", "numpy", "ml_dtypes"} | sys.stdlib_module_names
    if name == "ref.__main__":
        allowed |= {"tokenizers"}
    return within(name, "ref") and top not in allowed


RULES = {
    "ref imports NumPy, ml_dtypes, the standard library and ref": is_outside_ref,
    "server imports of engine only api and errors": lambda name, target: (
        within(name, "server") and within(target, "engine") and target not in ("engine.api", "engine.errors")
    ),
    "server imports neither ref nor conformance": lambda name, target: (
        within(name, "server") and target.split(".")[0] in ("ref", "conformance")
    ),
    "only the HTTP process imports server": lambda name, target: (
        within(target, "server") and not within(name, "server") and name not in HTTP_PROCESS
    ),
    "conformance is imported by nobody": lambda name, target: (
        within(target, "conformance") and not within(name, "conformance")
    ),
    "ref is used by the CPU's ops and by conformance": lambda name, target: (
        within(target, "ref")
        and within(name, "engine")
        and name != "engine.ops"
        and not within(name, "engine.cpu")
        and name != "engine.comm.mpi_sums"  # what CPU ranks send
        and name != "engine.bench.load_picture"  # drawn as the plots of the course are
        and name not in ("engine.split", "engine.split_sizes")  # which part a rank has, decided before load
        # what quantized checkpoints mean is said once, and their numbers are made before or at load, off the token path
        and not within(name, "engine.quantize")
        and not (
            within(target, "ref.quant") or (target == "ref.checkpoint" and name == "engine.checkpoint.quantized_folder")
        )
    ),
    "engine follows the layers": lambda name, target: (
        within(name, "engine") and within(target, "engine") and layer(name) < layer(target)
    ),
    "no relative imports": lambda name, target: target.startswith("."),
    "cupy is imported by a few modules of engine.kernels, which nobody else imports": lambda name, target: (
        name not in GPU and (target.split(".")[0] in ("cupy", "cuda") or target in GPU)
    ),
    "kernels never use ref": lambda name, target: within(name, KERNELS) and within(target, "ref"),
    "torch, transformers and jax are not imported": lambda name, target: (
        target.split(".")[0] in NOT_AT_RUN_TIME and not any(within(name, tool) for tool in ORACLE)
    ),
    "tools that need an oracle are imported by nobody": lambda name, target: (
        any(within(target, tool) for tool in ORACLE) and not any(within(name, tool) for tool in ORACLE)
    ),
    "some packages stay behind their own modules": lambda name, target: (
        name not in OWN_MODULES.get(target.split(".")[0], {name})
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    assert broken(rule) == []


def test_every_module_of_engine_has_a_layer() -> None:
    for name in modules():
        if within(name, "engine"):
            layer(name)
    missing = [entry for line in LAYERS for entry in line if entry not in modules()]
    assert missing == [], "LAYERS names modules that do not exist"


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for name, _, target in edges():
        if target in graph and target != name:
            graph[name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_import_inside_a_function() -> None:
    """Nor behind TYPE_CHECKING: both hide a cycle."""
    hidden = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if is_function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                hidden += [f"{name}:{line} imports {target}" for target, line in imports(node)]
    assert hidden == []


def modules_after(statements: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran the statements."""
    script = f"import sys\n{statements}\nprint(*sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {name.split(".")[0] for name in run.stdout.split()}


def test_nothing_heavy_is_loaded_at_run_time() -> None:
    """By our own modules or by anything that they import."""
    names = [name for name in modules() if not any(within(name, tool) for tool in (*ORACLE, *GPU))]
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert set(PACKAGES) <= loaded
    assert loaded.isdisjoint((*NOT_AT_RUN_TIME, "cupy"))


def test_the_border_is_light() -> None:
    """engine.api imports in a moment and anywhere."""
    assert "numpy" not in modules_after("import engine.api, engine.errors")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import engine.loop", ["engine.loop"]),
        ("from engine import loop, errors", ["engine.loop", "engine.errors"]),
        ("from engine.loop import Engine", ["engine.loop"]),
        ("def f():\n    import engine.loop as loop", ["engine.loop"]),
        ("from . import loop", ["."]),
        ("from .models import llama", [".models"]),
    ],
)
def test_imports_are_seen(code: str, found: list[str]) -> None:
    assert [target for target, _ in imports(ast.parse(code))] == found


@pytest.mark.parametrize(
    ("rule", "name", "target"),
    [
        ("ref imports NumPy, ml_dtypes, the standard library and ref", "ref.linear", "engine.weights"),
        ("server imports of engine only api and errors", "server.app", "engine.loop"),
        ("only the HTTP process imports server", "engine.serve", "server.app"),
        ("engine follows the layers", "engine.models.model", "engine.models.llama"),
        ("engine follows the layers", "engine.scheduler", "engine.ops"),
        ("torch, transformers and jax are not imported", "engine.loop", "torch.nn"),
        ("cupy is imported by a few modules of engine.kernels, which nobody else imports", "engine.loop", "cupy.cuda"),
        ("cupy is imported by a few modules of engine.kernels, which nobody else imports", "engine.loop", GPU[1]),
        ("kernels never use ref", "engine.kernels.compile", "ref.linear"),
        ("some packages stay behind their own modules", "engine.loop", "jinja2.sandbox"),
    ],
)
def test_a_rule_can_fail(rule: str, name: str, target: str) -> None:
    assert RULES[rule](name, target)
