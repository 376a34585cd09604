"""Golden logits of a checkpoint, and a look inside:

python -m ref --model DIR --ids 1,2,3 --out logits.npz
python -m ref --model DIR --prompt "Hello" --trace
python -m ref --model DIR --ids 1,2,3 --layers layers.npz
python -m ref --model DIR --ids 1,2,3 --compare engine
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.arguments import check_checkpoint, parse_ids
from ref.config import read_config
from ref.model.registry import forward
from ref.model.run import Trace
from ref.quant.scheme import ACTIVATIONS, read_weights
from ref.sampling import log_softmax, rank

try:
    import tokenizers
except ImportError:  # --ids works without it
    tokenizers = None  # type: ignore[assignment]

NUM_GUESSES = 5


LAYER_OUTPUTS = ("attn_out", "mlp_out", "residual", "k_cached", "v_cached", "latent_cached", "expert_ids")


class LayerKeeper:
    """Keeps what each layer puts out, by name: after attention and after the MLP, the residual stream after both,
    what goes into the cache, and which experts were chosen."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, value: NDArray[Any]) -> None:
        if name.rsplit(".", 1)[-1] in LAYER_OUTPUTS:
            self.arrays[name] = value


class TracePrinter:
    """Prints one line an intermediate: name, shape, range, and the time since the line before."""

    def __init__(self) -> None:
        print(f"{'name':<40} {'shape':<16} {'min':>11} {'max':>11} {'ms':>9}")
        self.last = time.perf_counter()

    def __call__(self, name: str, value: NDArray[Any]) -> None:
        now = time.perf_counter()
        low, high = (value.min(), value.max()) if value.size else (0.0, 0.0)
        shape = "×".join(map(str, value.shape))
        print(f"{name:<40} {shape:<16} {low:>11.4g} {high:>11.4g} {1e3 * (now - self.last):>9.2f}")
        self.last = time.perf_counter()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for input that cannot be used, with one line on stderr that says why."""
    args = _parse(arguments)
    try:
        check_checkpoint("--model", args.model, args.config)
        config = read_config(args.config or args.model)
        if args.ids is not None:
            token_ids = parse_ids(args.ids, config.vocab_size)
        else:
            token_ids = _encode(args.model, args.prompt)
        weights = read_weights(args.model, args.dtype, activations=args.activations)
        layers, tracers = LayerKeeper(), list[Trace]()
        if args.trace:
            tracers.append(TracePrinter())
        if args.layers is not None:
            tracers.append(layers)

        def trace(name: str, value: NDArray[Any]) -> None:
            for tracer in tracers:
                tracer(name, value)

        logits = forward(config, weights, token_ids, trace=trace).astype(np.float32)
        _save(args.out, {"logits": logits})
        _save(args.layers, {name: _narrow(value) for name, value in layers.arrays.items()} | {"logits": logits})
    except (ValueError, OSError) as error:
        print(f"python -m ref: error: {error}", file=sys.stderr)
        return 2
    _report(args, token_ids, logits)
    return _compare(args.model, token_ids) if args.compare else 0


def _compare(model: Path, token_ids: list[int]) -> int:
    """Runs the engine beside ref in a process of its own: ref knows nothing of the engine, conformance knows both."""
    ids = ",".join(map(str, token_ids))
    command = [sys.executable, "-m", "conformance", "--layers", str(model), "--ids", ids]
    return subprocess.run(command, check=False).returncode


def _save(path: Path | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    if path is not None:
        with open(path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]


def _narrow(value: NDArray[Any]) -> NDArray[Any]:
    """float32 for floating values; numbers of experts as they are."""
    return value.astype(np.float32) if np.issubdtype(value.dtype, np.floating) else value


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ref", description="The NumPy reference model.")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and *.safetensors")
    parser.add_argument("--config", type=Path, help="another config.json than the folder's own")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--ids", help="token ids, separated by commas")
    text.add_argument("--prompt", help="text; needs the folder's tokenizer.json and the tokenizers package")
    parser.add_argument("--out", type=Path, help='file for the array "logits" [num_tokens, vocab_size] float32 (.npz)')
    parser.add_argument("--layers", type=Path, help="file for what each layer puts out, by name (.npz)")
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default="float",
        help="of a quantized layer: float with decoded weights, or as its format's kernel does",
    )
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="of all arithmetic")
    parser.add_argument("--compare", choices=("engine",), help="show where the engine's run of these tokens parts")
    parser.add_argument("--trace", action="store_true", help="print name, shape, range and time of every step")
    return parser.parse_args(arguments)


def _encode(model: Path, prompt: str) -> list[int]:
    if tokenizers is None:
        raise ValueError("--prompt needs the package tokenizers (pip install tokenizers); or give --ids")
    file = model / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"--prompt needs {file}, which does not exist; or give --ids")
    token_ids: list[int] = tokenizers.Tokenizer.from_file(str(file)).encode(prompt).ids
    if not token_ids:
        raise ValueError("--prompt gives no token; give some text")
    return token_ids


def _report(args: argparse.Namespace, token_ids: list[int], logits: NDArray[np.float32]) -> None:
    """The likeliest next tokens after the last one, and where the logits went."""
    logprobs = log_softmax(logits[-1])
    best = rank(logits[-1])[:NUM_GUESSES]
    print(f"{len(token_ids)} tokens; the likeliest next: " + ", ".join(f"{i} ({logprobs[i]:.3f})" for i in best))
    if args.out is not None:
        print(f"logits {list(logits.shape)} float32 written to {args.out}")
    if args.layers is not None:
        print(f"outputs of each layer written to {args.layers}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends other tools: with no word
    sys.exit(main())
