"""What quantised activations cost in quality: perplexity and top-1 agreement, ours and llama.cpp's, on the same tokens.

    python benchmarks/quality.py [--quick] [--llama-cpp DIR | --alone] [--json FILE]

The text is cut into windows of 512 tokens. The successor of each token from the middle of a window on (but for the last) is
predicted: 255 predictions a window, more than 20,000 in all. llama.cpp computes the same windows through ``llama-perplexity``,
on the file as it is (4-bit weights with 8-bit activations) and on the same weights as float32. Agreement: how often two of
them find the same token likeliest.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from engine import ACTIVATIONS, PAGE_SIZE, Bench, add_model_options
from llama_cpp import add_option, find_or_build

from microserving.engine.runner import RunnerChunk
from microserving.model_files import ResolvedModel, open_model
from microserving.tokenizer import Tokenizer

WINDOW = 512
MIDDLE = WINDOW // 2
TEXT = Path(__file__).parent / "data" / "english.txt"


@dataclass(frozen=True)
class Reading:
    """best: int32 [windows, 255], the likeliest successor of each predicted token's predecessor."""

    perplexity: float
    best: npt.NDArray[np.int32]


def read_window(bench: Bench, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """(negative log likelihood of the true successors, likeliest successors) of positions MIDDLE ... WINDOW - 2.

    Rows that need logits go as chunks of one token, all in one step over the same pages: a layer stores every K/V of a step
    before it attends, so each row sees all positions up to its own.
    """
    pages = list(range(WINDOW // PAGE_SIZE))
    bench.runner.run([RunnerChunk(tokens[:MIDDLE], 0, pages, False)])
    rows = [RunnerChunk(tokens[at : at + 1], at, pages, True) for at in range(MIDDLE, WINDOW - 1)]
    logits = bench.runner.run(rows).logits.astype(np.float64)
    highest = logits.max(axis=1)
    normaliser = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    true = logits[np.arange(len(rows)), tokens[MIDDLE + 1 :]]
    return normaliser - true, logits.argmax(axis=1).astype(np.int32)


def read_text(bench: Bench, windows: npt.NDArray[np.int32]) -> Reading:
    found = []
    for done, window in enumerate(windows.tolist()):
        found.append(read_window(bench, window))
        print(
            f"\r{bench.activations}: window {done + 1} of {len(windows)}", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    nll = np.stack([nll for nll, _ in found])
    return Reading(float(np.exp(nll.mean())), np.stack([best for _, best in found]))


def cut(model: ResolvedModel, text: str, count: int | None) -> npt.NDArray[np.int32]:
    """int32 [windows, WINDOW], each with the model's start token first when it has one, as llama.cpp does it."""
    tokenizer = Tokenizer.load(model)
    ids = np.array(tokenizer.encode(text), np.int32)
    starts = ids[0] == tokenizer.bos_token_id
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)[:count].copy()
    if starts:
        windows[:, 0] = tokenizer.bos_token_id
    return windows


def their_readings(
    options: argparse.Namespace, model: ResolvedModel, windows: npt.NDArray[np.int32]
) -> dict[str, Reading]:
    llama, found = find_or_build(options.llama_cpp), {}
    for name, gguf in (("llama.cpp F32", llama.f32_of(model.source_path)), ("llama.cpp", model.source_path)):
        result = llama.read_text(gguf, options.text, WINDOW, len(windows), options.threads)
        if not np.array_equal(result.tokens[:, 1:], windows[:, 1:]):
            sys.exit("llama.cpp cuts this text into other tokens than we do")
        found[name] = Reading(result.perplexity, result.best)
    return found


def report(readings: dict[str, Reading]) -> list[dict[str, object]]:
    names = list(readings)
    print("| | perplexity | " + " | ".join(f"agrees with {name}" for name in names) + " |")
    print("|---" * (len(names) + 2) + "|")
    rows: list[dict[str, object]] = []
    for name, reading in readings.items():
        agreement = {other: float((reading.best == found.best).mean()) for other, found in readings.items()}
        cells = ("" if other == name else f"{100 * share:.2f} %" for other, share in agreement.items())
        print(f"| {name} | {reading.perplexity:.4f} | " + " | ".join(cells) + " |")
        rows.append({"name": name, "perplexity": reading.perplexity, "agreement": agreement})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_model_options(parser)
    add_option(parser)
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--quick", action="store_true", help="four windows only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    model = open_model(options.model)
    windows = cut(model, options.text.read_text(), 4 if options.quick else None)
    readings = {} if options.alone else their_readings(options, model, windows)
    for activations in ACTIVATIONS if options.activations is None else (options.activations,):
        chosen = copy.copy(options)
        chosen.activations = activations
        bench = Bench(model, chosen, WINDOW // PAGE_SIZE)
        readings[f"ours {activations}"] = read_text(bench, windows)
    predictions = len(windows) * (WINDOW - 1 - MIDDLE)
    print(f"{model.name}, {windows.size} tokens, {predictions} predictions, K/V {options.kv_dtype}")
    rows = report(readings)
    if options.json is not None:
        head = {"model": model.name, "tokens": int(windows.size), "predictions": predictions}
        options.json.write_text(json.dumps({**head, "results": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
