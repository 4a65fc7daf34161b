"""SimSD on the demo pair: what drafts by demo-draft are worth to demo.

    python benchmarks/speculation.py [--problems 200] [--json FILE] [--quick]

Tokens per target forward count generated tokens up to and including the end token over
prefill, verification and storing forwards of the target alone; the drafter's forwards are
in a column of their own. Acceptance is of the drafted tokens that were judged. `as target`
is the share of problems with the very tokens of the target's own decoding in these blocks.
The expected speed-up takes a forward of either model to cost its parameters' bytes, which
is what one costs on a TPU at small batches.
"""

import sys
from itertools import islice
from typing import Any

from common import finish, parse_args

import dllm_jax
from dllm_jax.params import count_params
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026

CASES: list[tuple[str, dict[str, Any]]] = []
for _length in (4, 8, 16):
    for _strategy in ("low_confidence_static", "low_confidence_dynamic", "sequential"):
        _shared = {"block_length": _length, "remasking_strategy": _strategy}
        CASES.append(("block", _shared))
        if _strategy != "sequential":  # paired verification has no such order
            CASES.append(("simsd", {**_shared, "verification": "paired"}))
        _exact = {**_shared, "verification": "exact"}
        CASES.append(("simsd", _exact))
        if _strategy != "low_confidence_dynamic":  # it drafts many slots at once as it is
            CASES.append(("simsd", {**_exact, "draft_threshold": 0.8}))


def main() -> None:
    """Runs every case on the same problems."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo"},
        draft_model={"default": "demo-draft"},
        problems={"type": int, "default": 200},
        strategy={"action": "append", "help": "only these; repeatable"},
    )
    count = 16 if args.quick else args.problems
    wanted = [
        case
        for case in CASES
        if not args.strategy or case[1]["remasking_strategy"] in args.strategy
    ]
    model, drafter = (dllm_jax.load(name) for name in (args.model, args.draft_model))
    ratio = count_params(drafter.config) / count_params(model.config)
    problems = list(islice(generate_problems("test", _SEED), count))
    baseline: list[Any] = []
    rows = []
    for decoder, given in wanted[:3] if args.quick else wanted:
        pair = {"draft_model": drafter} if decoder == "simsd" else {}
        outputs = dllm_jax.generate(
            model,
            [problem.question for problem in problems],
            decoder,
            max_new_tokens=80,
            **given,
            **pair,
        )
        own = decoder == "block"
        baseline = outputs if own else baseline
        tokens = sum(out.stats.generated_tokens for out in outputs)

        def forwards(kind, outputs=outputs):
            return sum(out.stats.forwards[kind] for out in outputs)

        of_drafter = forwards("draft")
        of_target = forwards("total") - of_drafter
        cost = of_target + ratio * of_drafter
        base = sum(out.stats.forwards["total"] for out in baseline) / sum(
            out.stats.generated_tokens for out in baseline
        )
        judged = sum(sum(out.stats.more.get("examined", [])) for out in outputs)
        kept = sum(sum(out.stats.more.get("accepted", [])) for out in outputs)
        right = sum(
            parse_answer(out.text) == problem.answer
            for out, problem in zip(outputs, problems, strict=True)
        )
        same = sum(
            one.tokens == other.tokens for one, other in zip(outputs, baseline, strict=True)
        )
        rows.append(
            {
                "block": given["block_length"],
                "strategy": given["remasking_strategy"],
                "verification": given.get("verification", "(target alone)"),
                "draft threshold": given.get("draft_threshold", ""),
                "accuracy %": 100.0 * right / count,
                "as target %": 100.0 * same / count,
                "tokens/target forward": tokens / of_target,
                "draft forwards/token": of_drafter / tokens,
                "acceptance": kept / judged if judged else "",
                "expected speed-up": base * tokens / cost,
            }
        )
        print(rows[-1], file=sys.stderr)
    print(
        f"{args.draft_model} drafts for {args.model}: {100 * ratio:.0f} % of its "
        f"parameters; {count} unseen problems, greedy, {model.dtype}\n"
    )
    finish(args, rows)


if __name__ == "__main__":
    main()
