"""Draws in which order a decoder unmasks the tokens of an answer.

    python benchmarks/denoising_order.py [--output docs/denoising_order.png] [--quick]

Each cell is a token; its number and colour say which forward unmasked it. Needs
matplotlib (the `eval` extra).
"""

from itertools import islice
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import finish, parse_args

import dllm_jax
from dllm_jax.plots import order_map
from dllm_jax.training.problems import generate_problems

_CASES = (
    ("ar", {}),
    ("block", {"block_length": 8, "threshold": 0.9}),
    ("block", {"block_length": 16, "threshold": 0.7}),
)


def main() -> None:
    """Draws one problem with several settings."""
    args = parse_args(
        __doc__.splitlines()[0],
        output={"type": Path, "default": Path("docs/denoising_order.png")},
        seed={"type": int, "default": 7, "help": "which sample problem"},
    )
    model = dllm_jax.load("demo")
    (problem,) = islice(generate_problems("test", args.seed), 1)
    cases = _CASES[:1] if args.quick else _CASES
    figure, all_axes = plt.subplots(
        len(cases), 1, figsize=(12, 2.0 * len(cases)), squeeze=False
    )
    rows = []
    for axes, (decoder, settings) in zip(all_axes[:, 0], cases, strict=True):
        out = dllm_jax.generate(model, problem.question, decoder, **settings)[0]
        forwards, words = out.stats.forwards["denoise"], [decoder]
        words += [f"{name} {value}" for name, value in settings.items()]
        title = f"{', '.join(words)}: {out.stats.generated_tokens} tokens"
        title += f" in {forwards} forwards"
        order_map(out, model.tokenizer, title=title, axes=axes)
        rows.append({"case": ", ".join(words), "forwards": forwards, "text": out.text})
    figure.suptitle(problem.question, fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110)
    finish(args, rows)


if __name__ == "__main__":
    main()
