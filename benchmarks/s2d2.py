"""S2D2 on the demo model, against autoregression and tuned dynamic decoding.

    python benchmarks/s2d2.py [--problems 200] [--length 8] [--json FILE] [--quick]

Problems come from the test split, which training never saw, and drafts are the most
probable tokens. Accuracy is the share of problems whose number behind `####` is right.
Tokens per forward counts generated tokens up to and including the end token over all
forwards, prefill included; tokens run counts the tokens that these forwards processed, for
each generated one. Accepted is the share of the draft tokens in verified spans that came
before the span's first rejection. `against ar` is the share of problems with the very
tokens that `ar` gives.
"""

import sys
from itertools import islice
from typing import Any

from common import finish, parse_args

import dllm_jax
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026
_BATCH = 50
_CAUSAL = {"cache_ver": True, "draft_ver": True}
_SCORE = {
    "token_acceptance_estimator": "soft_entropy_negexp",
    "do_verify_policy": "score_threshold",
}
_HYSTERESIS = {
    **_SCORE,
    "do_verify_policy": "score_hysteresis",
    "hysteresis_threshold_on": 1.0,
    "hysteresis_threshold_off": -5.0,
    "score_penalty_coef": 1.0,
}


def baselines(length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> decoder and settings, without speculation."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {"ar": ("ar", {})}
    block = {"block_length": length}
    cases["static"] = ("block", {**block, "remasking_strategy": "low_confidence_static"})
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        cases[f"dynamic {threshold}"] = ("block", {**block, "threshold": threshold})
    return cases


def policies(length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """S2D2's policies over their thresholds, by both rules, with causal caches."""
    found: dict[str, dict[str, Any]] = {}
    for rule in ("greedy", "stochastic"):
        common = {"block_length": length, "acceptance": rule, **_CAUSAL}
        found[f"{rule}, span >= 1"] = common
        found[f"{rule}, span >= {length // 2}"] = {
            **common,
            "min_ssd_span_length": length // 2,
        }
        for price in (1.0, 4.0, 6.0):
            score = {**_SCORE, "do_verify_score_type": "difference_static"}
            score |= {"score_penalty_coef": price, "do_verify_score_threshold": 0.0}
            found[f"{rule}, expected >= {price:g}"] = {**common, **score}
        found[f"{rule}, hysteresis"] = {**common, **_HYSTERESIS}
        bandit = {"do_verify_policy": "contextual_bandit_ucb"}
        found[f"{rule}, bandit"] = {**common, **bandit}
        found[f"{rule}, span >= 1, block-causal cache"] = {
            "block_length": length,
            "acceptance": rule,
        }
    return {name: ("s2d2", given) for name, given in found.items()}


def switches(length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """What the published rule leaves on the table, one after the other."""
    found = {}
    for rule in ("greedy", "stochastic"):
        given = {"block_length": length, "acceptance": rule, **_CAUSAL, "fold": False}
        reuse = {**given, "reuse_verified": True}
        folded = {**reuse, "fold": True, "fold_verify": True}
        found[f"{rule}, published rule"] = given
        found[f"{rule}, reuse"] = reuse
        found[f"{rule}, reuse, bonus"] = {**reuse, "bonus_token": True}
        found[f"{rule}, reuse, fold, fold_verify"] = folded
        every = {**folded, "bonus_token": True}
        found[f"{rule}, all"] = every
        routed = {**every, **_HYSTERESIS}
        found[f"{rule}, all, hysteresis"] = routed
    return {name: ("s2d2", given) for name, given in found.items()}


def _recorded(model: dllm_jax.Model) -> list[Any]:
    """The final states of the batches that the model decodes from now on."""
    states: list[Any] = []
    run_program = model.run_program

    def run(key, build, args):
        state = run_program(key, build, args)
        if key[1] == "go_on":  # others are given away to the next program
            states.append(state)
        return state

    model.run_program = run
    return states


def main() -> None:
    """Runs every case on the same problems."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo"},
        problems={"type": int, "default": 200},
        length={"type": int, "default": 8, "help": "tokens of a block"},
    )
    count = 16 if args.quick else args.problems
    model = dllm_jax.load(args.model)
    problems = list(islice(generate_problems("test", _SEED), count))
    cases = baselines(args.length) | policies(args.length) | switches(args.length)
    if args.quick:
        cases = {name: cases[name] for name in ("ar", "dynamic 0.9", "greedy, span >= 1")}
    states = _recorded(model)
    first: list[list[int]] = []
    rows = []
    for name, (decoder, given) in cases.items():
        states.clear()
        outputs = dllm_jax.generate(
            model,
            [problem.question for problem in problems],
            decoder,
            max_new_tokens=80,
            batch_size=_BATCH,
            **given,
        )
        first = first or [out.tokens for out in outputs]

        def total(kind: str, outputs=outputs) -> int:
            return sum(out.stats.forwards[kind] for out in outputs)

        right = sum(
            parse_answer(out.text) == problem.answer
            for out, problem in zip(outputs, problems, strict=True)
        )
        tokens = sum(out.stats.generated_tokens for out in outputs)
        speculative = [state for state in states if hasattr(state, "judged")]
        judged = sum(int(s.judged.sum()) for s in speculative)
        accepted = sum(int(s.kept.sum()) for s in speculative)
        same = sum(out.tokens == ids for out, ids in zip(outputs, first, strict=True))
        rows.append(
            {
                "decoder": decoder,
                "case": name,
                "accuracy %": 100.0 * right / count,
                "tokens/forward": tokens / total("total"),
                "verified/drafts": total("verify") / max(total("draft"), 1),
                "accepted %": 100.0 * accepted / max(judged, 1),
                "tokens run": sum(out.stats.positions for out in outputs) / tokens,
                "against ar %": 100.0 * same / count,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        f"{args.model}, {count} unseen problems, blocks of {args.length}, {model.dtype}\n"
    )
    finish(args, rows)


if __name__ == "__main__":
    main()
