"""What LEAP saves, what its settings do, and how near its copies come to the next state.

    python benchmarks/leap.py [--model demo-llada] [--table decoders] [--problems 200]
        [--batch 50] [--json FILE] [--quick]

Tables, all of unseen problems, greedily, 64 new tokens in blocks of 32:

    decoders   LEAP beside the confidence threshold and the rules that look at the past
    sweep      LEAP's settings one by one
    lookahead  along confidence decoding: how far the copies' distributions are from those
               of the next forward (with LEAP's candidates, and with the very tokens that
               come next), and how often a stable first choice is the final one

`forwards` and `token-forwards` (tokens run in them, appended ones too) are means a problem.
`fewer %` compares forwards with the first row's, `early` counts the tokens that a problem
unmasked early, `same %` is the share of answers with the very tokens of the first row.
"""

import functools
import sys
from itertools import islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import finish, parse_args

import dllm_jax
from dllm_jax.decoding import leap, loop
from dllm_jax.decoding.base import DECODERS, UNDECIDED
from dllm_jax.decoding.bidirectional import look, open_window
from dllm_jax.request import plan
from dllm_jax.settings import traced_settings
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026
_NEW = 64
_FAST = {"block_length": 32, "cache": "none"}
_KLASS = {"block_length": 32}

Case = tuple[str, dict[str, Any]]
DECODER_CASES: list[Case] = [("fast_dllm", {**_FAST, "threshold": 0.9})]
DECODER_CASES += [("fast_dllm", {**_FAST, "threshold": t}) for t in (0.8, 0.7, 0.6)]
DECODER_CASES += [
    ("leap", {}),
    ("leap", {"tau": 0.6}),
    ("leap", {"tau": 0.5}),
    ("leap", {"tau": 0.5, "perturbation": "future"}),
    ("klass", {**_KLASS, "threshold": 0.9, "kl_threshold": 0.01}),
    ("klass", {**_KLASS, "threshold": 0.6, "kl_threshold": 0.015}),
    ("wino", {"block_length": 32, "threshold": 0.6, "threshold_back": 0.9}),
    ("credit", {"block_length": 32}),
    ("fast_dllm", {**_FAST, "remasking_strategy": "hierarchy"}),
    ("fast_dllm", {**_FAST, "factor": 1.0}),
    ("fast_dllm", {**_FAST, "remasking_strategy": "eb_sampler", "eb_threshold": 0.1}),
    ("fast_dllm", {**_FAST, "remasking_strategy": "margin", "margin_threshold": 0.8}),
    ("fast_dllm", {**_FAST, "entropy_threshold": 0.3}),
    ("leap", {"entropy_threshold": 0.3}),
]
for _cache in ("prefix", "dual"):
    DECODER_CASES += [
        ("fast_dllm", {"block_length": 32, "cache": _cache, "threshold": 0.9}),
        ("leap", {"cache": _cache}),
    ]

SWEEP_CASES: list[Case] = [("fast_dllm", {**_FAST, "threshold": 0.9}), ("leap", {})]
SWEEP_CASES += [
    ("leap", {"perturbation": p, "candidates_see": c})
    for p in leap.PERTURBATIONS
    for c in ("text", "all")
]
SWEEP_CASES += [("leap", {"num_candidates": n}) for n in (1, 3)]
SWEEP_CASES += [("leap", {"eta": e}) for e in (0.05, 0.1, 0.4, 0.6, 0.8)]
SWEEP_CASES += [("leap", {"tau": t}) for t in (0.8, 0.6, 0.5, 0.4)]
SWEEP_CASES += [("leap", {"early_confidence": c}) for c in ("perturbed", "least")]
SWEEP_CASES += [("leap", {"tau": t, "consistency": False}) for t in (0.7, 0.5)]


def compare(model, problems, cases: list[Case], batch: int) -> list[dict[str, Any]]:
    """One row a case."""
    rows: list[dict[str, Any]] = []
    reference: list[Any] = []
    for decoder, given in cases:
        outs = dllm_jax.generate(
            model,
            [problem.question for problem in problems],
            decoder,
            max_new_tokens=_NEW,
            batch_size=batch,
            **given,
        )
        reference = reference or outs

        def total(count, outs=outs):
            return sum(count(out) for out in outs)

        answers = zip(outs, problems, strict=True)
        right = sum(parse_answer(out.text) == p.answer for out, p in answers)
        same = sum(a.tokens == b.tokens for a, b in zip(outs, reference, strict=True))
        forwards = total(lambda out: out.stats.forwards["total"])
        before = sum(out.stats.forwards["total"] for out in reference)
        named = {k: v for k, v in given.items() if k not in ("block_length", "cache")}
        rows.append(
            {
                "decoder": decoder,
                "settings": ", ".join(f"{k} {v}" for k, v in named.items()),
                "cache": outs[0].stats.cache,
                "accuracy %": 100.0 * right / len(outs),
                "forwards": forwards / len(outs),
                "fewer %": 100.0 * (1.0 - forwards / before),
                "tokens/forward": total(lambda out: out.stats.generated_tokens) / forwards,
                "token-forwards": total(lambda out: out.stats.positions) / len(outs),
                "early": total(lambda out: out.stats.more.get("early", 0)) / len(outs),
                "same %": 100.0 * same / len(outs),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _states(model, problems):
    """Confidence decoding, state by state: a tau that nothing reaches."""
    request = plan(model.config, "leap", max_new_tokens=_NEW, tau=2.0)
    settings, fns = traced_settings(request.settings), model.fns(model.params)
    outs = _FirstState(model)
    dllm_jax.generate(
        outs, [p.question for p in problems], "leap", max_new_tokens=_NEW, tau=2.0
    )
    step = jax.jit(functools.partial(DECODERS["leap"].step, fns, settings))
    return loop.run_in_python(step, outs.first)


def _with_next(model, state, after):
    """The state with what its own forward unmasks as its only candidates."""
    count = state.candidates.shape[1]
    slots = state.canvas.shape[1]
    index = np.minimum(np.asarray(state.cursor), slots - count)[:, None] + np.arange(count)
    before, later = (
        np.take_along_axis(np.asarray(x.canvas), index, 1) for x in (state, after)
    )
    mask_id = model.config.mask_id
    candidates = np.full(state.candidates.shape, mask_id, np.int32)
    candidates[..., 0] = np.where(before == mask_id, later, mask_id)
    return state.replace(candidates=jnp.asarray(candidates))


class _FirstState(dllm_jax.Model):
    """A model that keeps the state at which the loop begins."""

    first: Any = None

    def __init__(self, model):
        super().__init__(model.params, model.config, model.tokenizer)

    def run_program(self, key, build, args):
        if key[1] == "go_on" and self.first is None:
            self.first = jax.tree.map(jnp.copy, args[0])
        return super().run_program(key, build, args)


def _probe(model, given: dict[str, Any]):
    """state -> distributions of the original and of the copies `[B, W, V]`, and where."""
    request = plan(model.config, "leap", max_new_tokens=_NEW, **given)
    settings, fns = traced_settings(request.settings), model.fns(model.params)

    def probe(state):
        window = open_window(fns, request.settings.block_length, state)
        appended, informed = leap.superpose(fns, settings, state, window)
        hidden, _ = look(fns, "none", state, window, appended)
        width = window.index.shape[1]
        p = jax.nn.softmax(fns.logits(hidden[:, : 2 * width]))
        return p[:, :width], p[:, width:], window.masked, informed, window.index

    return jax.jit(probe)


def lookahead(model, problems) -> list[dict[str, Any]]:
    """One row a setting of the perturbation, and one for none.

    A slot counts where it is masked now and in the next forward, and its copy saw a
    candidate: one of the step before, as LEAP has them, or a token that the present step
    unmasks. Distances are total variation. `final` and the like are shares of first
    choices that are the token decided in the end: of the stable ones with a confidence
    from 0.5 to 0.9, and of the others.
    """
    states = _states(model, problems)
    final = np.asarray(states[-1].canvas)
    decided = np.asarray(states[-1].unmask_forward) != UNDECIDED
    cases = [
        ({"perturbation": p, "candidates_see": c}, known)
        for p in leap.PERTURBATIONS
        for c in ("text", "all")
        for known in (False, True)
    ]
    rows = []
    for given, known in cases:
        if not known:
            probe = _probe(model, given)
        seen = []
        for state, after in pairwise(states):
            state = _with_next(model, state, after) if known else state
            seen.append(jax.tree.map(np.asarray, probe(state)))
        gather: dict[str, list[np.ndarray]] = {}
        for (p, copy, masked, informed, index), following in pairwise(seen):
            later, _, still, _, place = following
            both = masked & still & informed & (index == place)
            token = np.take_along_axis(final, index, axis=1)
            returned = both & np.take_along_axis(decided, index, axis=1)
            first = p.argmax(-1)
            stable = first == copy.argmax(-1)
            unsure = returned & (p.max(-1) >= 0.5) & (p.max(-1) < 0.9)
            for name, value, where in (
                ("distance", np.abs(copy - later).sum(-1) / 2, both),
                ("plain distance", np.abs(p - later).sum(-1) / 2, both),
                ("agrees", copy.argmax(-1) == later.argmax(-1), both),
                ("plain agrees", first == later.argmax(-1), both),
                ("stable", stable, unsure),
                ("final if stable", first == token, unsure & stable),
                ("final if not", first == token, unsure & ~stable),
            ):
                gather.setdefault(name, []).append(value[where])
        means = {
            name: float(np.concatenate(values).mean()) if values else float("nan")
            for name, values in gather.items()
        }
        if not rows:
            plain = {
                "distance": means["plain distance"],
                "agrees %": 100.0 * means["plain agrees"],
                "stable %": 100.0,
                "final if stable %": 100.0
                * float(
                    np.concatenate(
                        gather["final if stable"] + gather["final if not"]
                    ).mean()
                ),
                "final if not %": "",
            }
            nothing = {"perturbation": "none", "candidates see": "", "candidates": ""}
            rows.append({**nothing, **plain})
        rows.append(
            {
                "perturbation": given["perturbation"],
                "candidates see": given["candidates_see"],
                "candidates": "what comes" if known else "step before",
                "distance": means["distance"],
                "agrees %": 100.0 * means["agrees"],
                "stable %": 100.0 * means["stable"],
                "final if stable %": 100.0 * means["final if stable"],
                "final if not %": 100.0 * means["final if not"],
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    _print_convergence(seen, states)
    return rows


def _print_convergence(seen, states) -> None:
    """How long tokens of confidence decoding were the first choice before they came."""
    final = np.asarray(states[-1].canvas)
    since = np.full(final.shape, -1)  # forward in which the present first choice became it
    choice, sure = np.full(final.shape, -1), np.zeros(final.shape)
    for number, (p, _, masked, _, index) in enumerate(seen):
        for row in range(len(final)):
            for place in np.flatnonzero(masked[row]):
                slot, token = index[row, place], p[row, place].argmax()
                if token != choice[row, slot]:
                    since[row, slot], choice[row, slot] = number, token
                    sure[row, slot] = p[row, place].max()
    order = np.asarray(states[-1].unmask_forward)
    decided = (order != UNDECIDED) & (since >= 0)
    lead = (order - since)[decided]
    early = lead > 0
    print(
        f"Of {decided.sum()} tokens {100.0 * early.mean():.1f} % were the first choice in "
        f"the forwards before the one that unmasked them, on average for "
        f"{lead[early].mean():.1f} forwards, at first with probability "
        f"{np.median(sure[decided][early]):.2f} (median).\n"
    )


def main() -> None:
    """Prints one table."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo-llada"},
        table={"default": "decoders", "choices": ("decoders", "sweep", "lookahead")},
        problems={"type": int, "default": 200},
        batch={"type": int, "default": 50, "help": "problems decoded at once"},
    )
    count = 8 if args.quick else args.problems
    model = dllm_jax.load(args.model)
    problems = list(islice(generate_problems("test", _SEED), count))
    print(f"{args.model}, {count} unseen problems, greedy, {model.dtype}\n")
    if args.table == "lookahead":
        rows = lookahead(model, problems)
    else:
        cases = DECODER_CASES if args.table == "decoders" else SWEEP_CASES
        cases = cases[:1] + cases[4:6] if args.quick else cases
        rows = compare(model, problems, cases, args.batch)
    finish(args, rows)


if __name__ == "__main__":
    main()
