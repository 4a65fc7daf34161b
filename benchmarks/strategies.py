"""Accuracy and tokens per forward of a demo model, strategy by strategy.

    python benchmarks/strategies.py [--model demo] [--problems 200] [--json FILE] [--quick]

Problems come from the test split, which training never saw. Accuracy is the share of
problems whose number behind `####` is right. Tokens per forward counts generated tokens
up to and including the end token over all forwards, prefill included; tokens run counts
the tokens that these forwards processed, for each generated one. `against first` is the
share of problems with the very tokens that the first row gives. Block-causal models
(demo) and bidirectional ones (demo-llada) have their own decoders, and so their own rows.
"""

import sys
from itertools import islice
from typing import Any

from common import finish, parse_args

import dllm_jax
from dllm_jax.request import plan
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026

BLOCK_CAUSAL: list[tuple[str, dict[str, Any]]] = [("ar", {})]
for _length in (4, 8, 16):
    _block = {"block_length": _length}
    BLOCK_CAUSAL += [
        (
            "block",
            {**_block, "remasking_strategy": "low_confidence_dynamic", "threshold": t},
        )
        for t in (0.5, 0.7, 0.8, 0.9, 0.95)
    ]
    BLOCK_CAUSAL += [
        ("block", {**_block, "remasking_strategy": "low_confidence_static"} | steps)
        for steps in ({}, {"denoising_steps": _length // 2})
    ]
    BLOCK_CAUSAL += [
        ("block", {**_block, "remasking_strategy": "entropy_bounded", "eb_threshold": b})
        for b in (0.05, 0.35)
    ]
    BLOCK_CAUSAL += [
        ("block", {**_block, "remasking_strategy": name})
        for name in ("sequential", "random")
    ]

BIDIRECTIONAL: list[tuple[str, dict[str, Any]]] = [
    ("masked", {"block_length": length}) for length in (8, 32)
]
for _cache in ("none", "prefix", "dual"):
    _fast = {"block_length": 8, "cache": _cache}
    BIDIRECTIONAL += [("fast_dllm", {**_fast, "threshold": t}) for t in (0.7, 0.9, 0.95)]
    BIDIRECTIONAL += [
        ("fast_dllm", {**_fast, "factor": 1.0}),
        ("fast_dllm", {**_fast, "entropy_threshold": 0.3}),
        ("fast_dllm", {**_fast, "remasking_strategy": "low_confidence"}),
    ]
BIDIRECTIONAL += [
    ("fast_dllm", {"block_length": 32, "cache": cache, "threshold": 0.9})
    for cache in ("none", "prefix", "dual")
]


def main() -> None:
    """Runs every case on the same problems."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo"},
        problems={"type": int, "default": 200},
    )
    count = 16 if args.quick else args.problems
    model = dllm_jax.load(args.model)
    causal = model.config.attention == "block_causal"
    cases = BLOCK_CAUSAL if causal else BIDIRECTIONAL
    problems = list(islice(generate_problems("test", _SEED), count))
    baseline: list[list[int]] = []
    rows = []
    for decoder, given in cases[:3] if args.quick else cases:
        arguments = {"max_new_tokens": 80 if causal else 64, **given}
        outputs = dllm_jax.generate(
            model, [problem.question for problem in problems], decoder, **arguments
        )
        baseline = baseline or [out.tokens for out in outputs]
        right = sum(
            parse_answer(out.text) == problem.answer
            for out, problem in zip(outputs, problems, strict=True)
        )
        tokens = sum(out.stats.generated_tokens for out in outputs)
        forwards = sum(out.stats.forwards["total"] for out in outputs)
        positions = sum(out.stats.positions for out in outputs)
        same = sum(out.tokens == ids for out, ids in zip(outputs, baseline, strict=True))
        settings = plan(model.config, decoder, **given).describe()
        limits = ("threshold", "factor", "entropy_threshold", "eb_threshold")
        limit = [given[name] for name in limits if name in given]
        rows.append(
            {
                "decoder": decoder,
                "block": given.get("block_length", 1),
                "strategy": settings.get("remasking_strategy", "sequential"),
                "limit": limit[0] if limit else "",
                "steps": given.get("denoising_steps", ""),
                "cache": outputs[0].stats.cache,
                "accuracy %": 100.0 * right / count,
                "tokens/forward": tokens / forwards,
                "tokens run": positions / tokens,
                "against first %": 100.0 * same / count,
            }
        )
        print(rows[-1], file=sys.stderr)
    print(f"{args.model}, {count} unseen problems, greedy, {model.dtype}\n")
    finish(args, rows)


if __name__ == "__main__":
    main()
