"""The plots of the course, from live data: every point is computed by the functions that the plot is about, through
ref/plot_data.py.

python -m ref.plot rope --out rope.svg
python -m ref.plot attention --out attention.svg                              of ref.induction's model
python -m ref.plot attention --model DIR --ids 1,2,3 --layer 0 --out a.svg    of any Llama
python -m ref.plot quantization --out quantization.svg
python -m ref.plot roofline --out roofline.svg

Source: what is drawn stands in the files of the functions that compute it; how, in ref/svg.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.arguments import check_checkpoint, parse_ids
from ref.config import read_config
from ref.induction import encode, induction_config, induction_weights
from ref.model.llama import LlamaConfig, llama
from ref.model.run import Weights
from ref.plot_data import FORMATS, attention_weights, quantization_errors, rope_scores, wavelengths
from ref.quant.scheme import read_weights
from ref.roofline import H200, LLAMA_3_1_8B, RTX_4090, decode_work, limit_seconds
from ref.svg import COLORS, Panel, curve, document, dot, frame, legend, line, square, text

Array = NDArray[Any]

INDUCTION_TEXT = "^glintglint"


def plot_rope() -> str:
    """Left: how scores fall with distance. Right: how fast each pair turns, and what scaling makes of it."""
    distances = np.unique(np.geomspace(1, 32768, 150).astype(np.int64))
    left = Panel(70, 40, 330, 260, (1, 32768), (-0.2, 1), log_x=True)
    shapes = frame(
        left, "q·k of equal vectors by distance", "distance, tokens", "score", (1, 32, 1024, 32768), (0, 0.5, 1)
    )
    thetas = (1e4, 5e5)
    for color, theta in zip(COLORS, thetas, strict=False):
        shapes.append(curve(left, distances.tolist(), rope_scores(theta, distances).tolist(), color))
    shapes += legend(300, 65, [f"theta {theta:g}" for theta in thetas])

    right = Panel(490, 40, 330, 260, (0, 63), (1, 1e8), log_y=True)
    title = "tokens that each pair takes to turn once; 8 × longer"
    shapes += frame(right, title, "pair", "tokens", (0, 16, 32, 48, 63), (1, 100, 1e4, 1e6, 1e8))
    kinds = ("default", "linear", "yarn", "llama3")
    for color, kind in zip(COLORS, kinds, strict=False):
        shapes.append(curve(right, list(range(64)), wavelengths(kind).tolist(), color))
    shapes.append(line(490, right.y(8192), 820, right.y(8192), COLORS[4], dashed=True))
    shapes.append(text(815, right.y(8192) + 14, "8192 tokens of training", "end", COLORS[4]))
    shapes += legend(505, 65, kinds)
    return document(850, 350, shapes)


def plot_attention(
    config: LlamaConfig,
    weights: Weights,
    token_ids: Sequence[int],
    names: Sequence[str],
    layers: Sequence[int],
) -> str:
    """A map for each head: a row a query, a column a key, the darker the more weight."""
    seen: dict[str, Array] = {}
    llama(config, weights, token_ids, trace=seen.__setitem__)
    cell, gap = 16.0, 60.0
    step = cell * len(token_ids) + gap
    shapes = []
    for row, layer in enumerate(layers):
        q, k = (seen[f"layers.{layer}.self_attn.{name}_rope"] for name in "qk")
        for head, shades in enumerate(attention_weights(q, k, config.sliding_window)):
            left, top = gap + step * head, gap + step * row
            shapes.append(text(left, top - 22, f"layer {layer}, head {head}"))
            shapes += attention_map(left, top, cell, shades, names)
    return document(round(gap + step * config.n_heads), round(gap + step * len(layers)), shapes)


def attention_map(left: float, top: float, cell: float, shades: Array, names: Sequence[str]) -> list[str]:
    """One head: shades [num_tokens, num_tokens], the tokens' names above and on the left."""
    shapes = []
    for i, name in enumerate(names):
        shapes.append(text(left - 5, top + cell * (i + 0.75), name, "end"))
        shapes.append(text(left + cell * (i + 0.5), top - 5, name, "middle"))
        for j in range(i + 1):
            shapes.append(square(left + cell * j, top + cell * i, cell - 1, max(0.04, float(shades[i, j]))))
    return shapes


def plot_quantization() -> str:
    """A line a format, a dot a kind of weight."""
    height = 26 * len(FORMATS)
    panel = Panel(190, 40, 420, height, (1e-3, 1), (len(FORMATS), 0), log_x=True)
    shapes = frame(panel, "", "‖ŵ − w‖ / ‖w‖", "", (0.001, 0.01, 0.1, 1), ())
    for place, (name, errors) in enumerate(quantization_errors().items()):
        y = place + 0.5
        shapes.append(text(180, panel.y(y) + 4, f"{name}: {FORMATS[name][0]:.2f} bits", "end"))
        shapes.append(line(190, panel.y(y), 610, panel.y(y)))
        for error, lower, color in zip(errors, (-0.12, 0.12), COLORS, strict=False):
            shapes.append(dot(panel, error, y + lower, color))
    shapes += legend(190, 15, ("normal weights", "one input of 512 ten times as large"))
    return document(640, height + 85, shapes)


def plot_roofline() -> str:
    """What a GPU computes at most by the number of sequences that decode together."""
    panel = Panel(70, 40, 420, 260, (1, 1024), (1, 1000), log_x=True, log_y=True)
    title = "Llama-3.1-8B decoding, 1024 tokens of context: the limit"
    shapes = frame(panel, title, "sequences", "TFLOP/s", (1, 4, 16, 64, 256, 1024), (1, 10, 100, 1000))
    nums = [2**power for power in range(11)]
    cases = [(gpu, itemsize) for gpu in (H200, RTX_4090) for itemsize in (2.0, 0.5)]
    for color, (gpu, itemsize) in zip(COLORS, cases, strict=False):
        work = [decode_work(LLAMA_3_1_8B, num, 1024, itemsize) for num in nums]
        rates = [flops / limit_seconds(flops, num_bytes, gpu) / 1e12 for flops, num_bytes in work]
        shapes.append(curve(panel, nums, rates, color))
    names = [f"{gpu.name}, {8 * itemsize:g} bits a weight" for gpu, itemsize in cases]
    return document(520, 350, shapes + legend(310, 245, names))


def main(arguments: list[str] | None = None) -> int:
    """Writes the plot; returns the exit status: 0, or 2 for input that cannot be used, with one line on stderr.

    Raises: nothing; a ValueError becomes that line.
    """
    parser = argparse.ArgumentParser(prog="python -m ref.plot", description="The plots of the course, as SVG.")
    parser.add_argument("plot", choices=("rope", "attention", "quantization", "roofline"))
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    parser.add_argument("--model", type=Path, help="attention of this Llama; without it, of ref.induction's model")
    parser.add_argument("--ids", help="token ids for --model, separated by commas")
    parser.add_argument("--layer", type=int, help="this layer of --model alone")
    args = parser.parse_args(arguments)
    plots = {"rope": plot_rope, "quantization": plot_quantization, "roofline": plot_roofline}
    try:
        drawn = _attention(args) if args.plot == "attention" else plots[args.plot]()
        args.out.write_text(drawn, encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"python -m ref.plot: error: {error}\n")
        return 2
    return 0


def _attention(args: argparse.Namespace) -> str:
    if args.model is None:
        return plot_attention(
            induction_config(), induction_weights(), encode(INDUCTION_TEXT), list(INDUCTION_TEXT), range(2)
        )
    check_checkpoint("--model", args.model)
    config = read_config(args.model)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"--model is a {config.architecture}; this plot knows Llama and Mistral")
    token_ids = parse_ids(args.ids or "", config.vocab_size)
    layers = range(config.n_layers) if args.layer is None else [args.layer]
    if not all(0 <= layer < config.n_layers for layer in layers):
        raise ValueError(f"--layer is {args.layer}; the model has layers 0 to {config.n_layers - 1}")
    weights = read_weights(args.model, "float64")
    return plot_attention(config, weights, token_ids, list(map(str, token_ids)), layers)


if __name__ == "__main__":
    sys.exit(main())
