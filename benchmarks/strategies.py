"""Accuracy and tokens per forward of the demo model, strategy by strategy.

    python benchmarks/strategies.py [--model demo] [--problems 200] [--json FILE] [--quick]

Problems come from the test split, which training never saw. Accuracy is the share of
problems whose number behind `####` is right. Tokens per forward counts generated tokens
up to and including the end token over all forwards, prefill included. `against ar` is
the share of problems with the very tokens that `ar` gives.
"""

import sys
from itertools import islice
from typing import Any

from common import finish, parse_args

import dllm_jax
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026

CASES: list[tuple[str, dict[str, Any]]] = [("ar", {})]
for _length in (4, 8, 16):
    _block = {"block_length": _length}
    CASES += [
        (
            "block",
            {**_block, "remasking_strategy": "low_confidence_dynamic", "threshold": t},
        )
        for t in (0.5, 0.7, 0.8, 0.9, 0.95)
    ]
    CASES += [
        ("block", {**_block, "remasking_strategy": "low_confidence_static"} | steps)
        for steps in ({}, {"denoising_steps": _length // 2})
    ]
    CASES += [
        ("block", {**_block, "remasking_strategy": "entropy_bounded", "eb_threshold": b})
        for b in (0.05, 0.35)
    ]
    CASES += [
        ("block", {**_block, "remasking_strategy": name})
        for name in ("sequential", "random")
    ]


def main() -> None:
    """Runs every case on the same problems."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo"},
        problems={"type": int, "default": 200},
    )
    count = 16 if args.quick else args.problems
    cases = CASES[:3] if args.quick else CASES
    model = dllm_jax.load(args.model)
    problems = list(islice(generate_problems("test", _SEED), count))
    baseline: list[list[int]] = []
    rows = []
    for decoder, settings in cases:
        outputs = dllm_jax.generate(
            model,
            [problem.question for problem in problems],
            decoder,
            max_new_tokens=80,
            **settings,
        )
        if decoder == "ar":
            baseline = [out.tokens for out in outputs]
        right = sum(
            parse_answer(out.text) == problem.answer
            for out, problem in zip(outputs, problems, strict=True)
        )
        tokens = sum(out.stats.generated_tokens for out in outputs)
        forwards = sum(out.stats.forwards["total"] for out in outputs)
        same = sum(out.tokens == ids for out, ids in zip(outputs, baseline, strict=True))
        extra = {
            "threshold": settings.get("threshold", settings.get("eb_threshold", "")),
            "steps": settings.get("denoising_steps", ""),
        }
        rows.append(
            {
                "decoder": decoder,
                "block": settings.get("block_length", 1),
                "strategy": settings.get("remasking_strategy", "sequential"),
                **extra,
                "accuracy %": 100.0 * right / count,
                "tokens/forward": tokens / forwards,
                "against ar %": 100.0 * same / count,
            }
        )
        print(rows[-1], file=sys.stderr)
    print(f"{args.model}, {count} unseen problems, greedy, {model.dtype}\n")
    finish(args, rows)


if __name__ == "__main__":
    main()
