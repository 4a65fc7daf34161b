"""What int8 changes: logits, tokens and answers, against bfloat16.

    python benchmarks/int8.py [--model demo] [--problems 200] [--json FILE] [--quick]

`logit error` is the mean absolute difference of the logits of whole solutions over their
standard deviation; `same argmax` the share of slots with the same most probable
token; `same tokens` the share of decoded answers with the very tokens of bfloat16, and
`accuracy` of right ones. Weights in int8 have a scale an output channel; `int8-dynamic`
also quantises what they are multiplied with, token by token; K/V in int8 a scale a vector.
"""

import sys
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import finish, parse_args

import dllm_jax
from dllm_jax import layouts
from dllm_jax.training.problems import generate_problems, parse_answer

_SEED = 2026
_CASES = (
    ("none", "auto"),
    ("none", "int8"),
    ("int8", "auto"),
    ("int8", "int8"),
    ("int8-dynamic", "auto"),
)


def logits_of(model: dllm_jax.Model, rows: np.ndarray) -> np.ndarray:
    """Float32 logits of whole rows, each token seeing its block and what is before it."""
    fns = model.fns(model.params)
    position = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    fields = layouts.block_causal(position, model.config.block_length)
    if model.config.attention == "bidirectional":
        fields = layouts.bidirectional(position)

    def run(tokens: jax.Array) -> jax.Array:
        return fns.logits(fns.forward(tokens, fields, None).hidden)

    return np.asarray(jax.jit(run)(rows))


def main() -> None:
    """Loads the model once a case."""
    args = parse_args(
        __doc__.splitlines()[0],
        model={"default": "demo"},
        problems={"type": int, "default": 200},
    )
    count = 16 if args.quick else args.problems
    problems = list(islice(generate_problems("test", _SEED), count))
    rows: list[dict[str, Any]] = []
    reference: list[Any] = []
    for quant, kv_dtype in _CASES:
        model = dllm_jax.load(args.model, dtype="bfloat16", quant=quant, kv_dtype=kv_dtype)
        texts = [f"{p.question} {p.solution}" for p in problems]
        tokens = np.array([(model.tokenizer.encode(t) * 8)[:64] for t in texts], np.int32)
        logits = logits_of(model, tokens)
        outputs = dllm_jax.generate(
            model, [p.question for p in problems], max_new_tokens=80
        )
        reference = reference or [logits, outputs]
        error = np.abs(logits - reference[0]).mean() / reference[0].std()
        pairs = list(zip(outputs, reference[1], strict=True))
        right = [
            parse_answer(o.text) == p.answer for o, p in zip(outputs, problems, strict=True)
        ]
        stored = sum(x.nbytes for x in jax.tree.leaves(model.params))
        rows.append(
            {
                "weights": "bfloat16" if quant == "none" else quant,
                "K/V": "bfloat16" if kv_dtype == "auto" else kv_dtype,
                "weights MB": stored / 1e6,
                "logit error %": 100.0 * float(error),
                "same argmax %": 100.0
                * float(np.mean(logits.argmax(-1) == reference[0].argmax(-1))),
                "same tokens %": 100.0 * np.mean([a.tokens == b.tokens for a, b in pairs]),
                "accuracy %": 100.0 * np.mean(right),
            }
        )
        print(rows[-1], file=sys.stderr)
    print(f"{args.model}, {count} unseen problems, greedy\n")
    finish(args, rows)


if __name__ == "__main__":
    main()
