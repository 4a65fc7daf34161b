"""Decoder `fast_dllm` on a scripted model in exact integers, against an oracle."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    EOS,
    MASK,
    ScriptedModel,
    quick_compilation,
    random_table,
    table_row,
    tiny_model,
    token_code,
)

from dllm_jax.decoding import fast_dllm
from dllm_jax.decoding.base import DECODERS
from dllm_jax.generate import generate
from dllm_jax.request import plan
from dllm_jax.settings import resolve_settings

SAME = CONFIG.__class__(**{**vars(CONFIG), "attention": "bidirectional"})
SHIFTED = SAME.__class__(**{**vars(SAME), "logit_alignment": "shifted"})
TABLE = random_table(3, {EOS: 1.0})
LENGTHS = (5, 33, 1, 18)
STRATEGIES = {
    "confidence_threshold": {"threshold": 0.5},
    "confidence_threshold_quota": {"threshold": 0.3, "denoising_steps": 2},
    "factor": {"factor": 1.5},
    "entropy_threshold": {"entropy_threshold": 1.0},
    "low_confidence": {"denoising_steps": 3},
    "low_entropy": {"denoising_steps": 4},
    "entropy": {"denoising_steps": 4},
    "hierarchy": {"threshold": 0.6, "low_threshold": 0.3},
    "entropy_bounded": {"eb_threshold": 2.0},
    "eb_sampler": {"eb_threshold": 1.0},
    "margin": {"margin_threshold": 0.4},
}
ALL = [
    *(("same", "none", name) for name in STRATEGIES),
    *(("same", "prefix", name) for name in ("confidence_threshold", "low_entropy")),
    *(("same", "dual", name) for name in ("confidence_threshold", "entropy")),
    *(("shifted", "prefix", name) for name in ("factor", "entropy")),
    *(("shifted", "dual", name) for name in ("confidence_threshold", "low_confidence")),
    ("shifted", "none", "confidence_threshold"),
]
every_kind = pytest.mark.parametrize(("alignment", "cache", "strategy"), ALL)


@pytest.fixture(scope="module")
def models():
    return {"same": ScriptedModel(TABLE, SAME), "shifted": ScriptedModel(TABLE, SHIFTED)}


def prompts_of(lengths) -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(0, EOS, length).tolist() for length in lengths]


def quota(step: int, steps: int, size: int) -> int:
    return size // steps + (step < size % steps)


def chosen_slots(strategy, settings, slots, step, size, confidence, entropy, lead):
    """The slots that a step unmasks, of the masked `slots`, in the words of the specs."""
    ranked = sorted(slots, key=lambda p: (-confidence[p], p))
    surest = sorted(slots, key=lambda p: (entropy[p], p))
    steps = settings.denoising_steps or size
    if strategy == "confidence_threshold":
        return {p for p in slots if confidence[p] >= settings.threshold} | {ranked[0]}
    if strategy == "confidence_threshold_quota":
        due = sum(quota(i, steps, size) for i in range(min(step + 1, steps)))
        best = ranked[: due - (size - len(slots))]
        return {p for p in best if confidence[p] >= settings.threshold} | {ranked[0]}
    if strategy == "factor":
        count = 1
        while count < len(ranked):
            if confidence[ranked[count]] < 1 - settings.factor / (count + 2):
                break
            count += 1
        return set(ranked[:count])
    if strategy == "entropy_threshold":
        limit = settings.entropy_threshold
        return {p for p in slots if entropy[p] <= limit} | {surest[0]}
    if strategy == "hierarchy":
        runs = [
            [s for s in slots if s - slots.index(s) == start]
            for start in {s - slots.index(s) for s in slots}
        ]
        leads = [min(run, key=lambda s: (-confidence[s], s)) for run in runs]
        passing = {s for s in slots if confidence[s] > settings.threshold}
        passing |= {s for s in leads if confidence[s] > settings.low_threshold}
        return passing | {ranked[0]}
    if strategy in ("entropy_bounded", "eb_sampler"):
        sums = np.cumsum([entropy[s] for s in surest])
        if strategy == "entropy_bounded":
            return set(surest[: max(np.sum(sums < settings.eb_threshold), 1)])
        return set(surest[: 1 + np.sum(sums[:-1] <= settings.eb_threshold)])
    if strategy == "margin":
        passing = {s for s in slots if lead[s] >= settings.margin_threshold}
        return passing | {max(slots, key=lambda s: (lead[s], -s))}
    if strategy == "low_confidence":
        return set(ranked[: quota(step, steps, size)])
    if strategy == "low_entropy":
        return set(surest[: quota(step, steps, size)])
    raise AssertionError(strategy)


def scheduled(settings, step: int, masks: int) -> tuple[int, int]:
    """The next step of Dream's schedule that reveals something, and how much."""
    while True:
        share = np.float32(settings.reveal[min(step, len(settings.reveal) - 1)])
        count = int(np.float32(masks) * share)
        if count:
            return step, count
        step += 1


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def oracle(config, settings, prompt, max_new_tokens, stop_ids):
    """Tokens, the forward of each, all forwards, and the tokens that they ran."""
    canvas = np.array(prompt + [MASK] * max_new_tokens)
    position = np.arange(len(canvas))
    when, forwards, ran = {}, 0, 0
    cursor, strategy = len(prompt), settings.remasking_strategy
    shifted = config.logit_alignment == "shifted"
    while cursor < len(canvas):
        block_end = min(cursor + settings.block_length, len(canvas))
        size, step, kept = block_end - cursor, 0, None
        while (canvas[cursor:block_end] == MASK).any():
            first, last = 0, len(canvas)
            code = token_code(canvas, position)
            if settings.cache == "none" or kept is None:
                kept, total = code, code.sum()
            else:
                first = cursor
                last = block_end if settings.cache == "dual" else len(canvas)
                total = kept.sum() - kept[first:last].sum() + code[first:last].sum()
            ran += last - first
            rows = TABLE[table_row(total, position)].astype(np.float64)
            p = softmax(rows[np.maximum(position - shifted, first)])
            entropy = -np.sum(p * np.log(p), axis=-1)
            token = p[:, :MASK].argmax(axis=-1)
            confidence = p[position, token]
            second, first_choice = np.sort(p[:, :MASK], axis=-1)[:, -2:].T
            lead = first_choice - second
            slots = [s for s in range(cursor, block_end) if canvas[s] == MASK]
            number = step
            if step == 0 and shifted and settings.cache != "none":
                chosen = {cursor}
            elif strategy == "entropy":
                number, count = scheduled(settings, step, len(slots))
                ranked = sorted(slots, key=lambda s, entropy=entropy: (entropy[s], s))
                chosen = set(ranked[:count])
            else:
                chosen = chosen_slots(
                    strategy, settings, slots, step, size, confidence, entropy, lead
                )
            for slot in chosen:
                canvas[slot], when[slot] = token[slot], forwards
            forwards, step = forwards + 1, number + 1
            answer = canvas[len(prompt) :].tolist()
            known = answer[: answer.index(MASK)] if MASK in answer else answer
            if any(t in stop_ids for t in known):
                cut = next(i for i, t in enumerate(known) if t in stop_ids)
                return known[:cut], when, forwards, ran
        cursor = block_end
    return canvas[len(prompt) :].tolist(), when, forwards, ran


@every_kind
def test_decodes_as_the_oracle_does(models, alignment, cache, strategy):
    """In a batch of mixed lengths: tokens, their forwards, and how much was run."""
    model, prompts = models[alignment], prompts_of(LENGTHS)
    given = {"cache": cache, "remasking_strategy": strategy, **STRATEGIES[strategy]}
    request = plan(model.config, "fast_dllm", block_length=6, **given)
    outputs = generate(
        model, prompts, "fast_dllm", max_new_tokens=20, block_length=6, **given
    )
    for prompt, out in zip(prompts, outputs, strict=True):
        want = oracle(model.config, request.settings, prompt, 20, SAME.eos_ids)
        tokens, when, forwards, ran = want
        assert out.tokens == tokens
        assert out.stats.forwards["denoise"] == forwards == out.stats.forwards["total"]
        assert out.stats.positions == ran
        for index, number in enumerate(out.unmask_forward):
            assert number == when[len(prompt) + index]
        exact = cache == "none"
        assert out.stats.cache == ("none (exact)" if exact else f"approximate ({cache})")


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("config", [SAME, SHIFTED], ids=["same", "shifted"])
def test_a_transformer_gives_a_row_what_its_prompt_gives_alone(config, cache):
    model, prompts = tiny_model(0, config), prompts_of((3, 50, 21))
    run = functools.partial(
        generate,
        model,
        decoder="fast_dllm",
        max_new_tokens=12,
        block_length=5,
        cache=cache,
        factor=20.0,
        temperature=0.5,
        seed=[4, 5, 6],
        stop_ids=(),
    )
    with quick_compilation():
        together = run(prompts)
        for index, prompt in enumerate(prompts):
            [alone] = run([prompt], seed=[4 + index])
            assert alone.tokens == together[index].tokens
            assert alone.unmask_forward == together[index].unmask_forward
            assert alone.stats.positions == together[index].stats.positions


def test_a_cache_of_one_block_changes_its_first_forwards_only():
    """All forwards of the first block but the first look at kept keys."""
    model, [prompt] = tiny_model(1, SAME), prompts_of((12,))
    with quick_compilation():
        outs = [
            generate(
                model,
                [prompt],
                "fast_dllm",
                max_new_tokens=8,
                block_length=8,
                cache=cache,
                remasking_strategy="low_confidence",
                stop_ids=(),
            )[0]
            for cache in ("none", "prefix", "dual")
        ]
    first = [o.confidence[o.unmask_forward.index(0)] for o in outs]
    np.testing.assert_allclose(first, first[0], rtol=1e-5)
    # The only block reaches to the end: what lies before and around it is the same.
    assert outs[1].tokens == outs[2].tokens
    np.testing.assert_allclose(outs[1].confidence, outs[2].confidence, rtol=1e-5)
    assert not np.allclose(outs[0].confidence, outs[1].confidence, rtol=1e-4)


def test_early_stop_changes_no_token(models):
    """Also where tokens are drawn, and forwards that unmask nothing are left out."""
    run = functools.partial(
        generate,
        models["shifted"],
        prompts_of((4, 9)),
        "fast_dllm",
        max_new_tokens=16,
        block_length=8,
        cache="dual",
        remasking_strategy="entropy",
        denoising_steps=16,
        temperature=0.8,
    )
    for one, other in zip(run(), run(early_stop=False), strict=True):
        assert one.tokens == other.tokens
        assert one.stats.forwards["total"] < other.stats.forwards["total"]


def test_values_are_traced(models):
    model = models["same"]
    request = {"max_new_tokens": 8, "block_length": 6, "cache": "dual"}
    generate(model, prompts_of((3,)), "fast_dllm", **request, threshold=0.5)
    before = model.num_traces
    generate(model, prompts_of((7,)), "fast_dllm", **request, threshold=0.7)
    assert model.num_traces == before


def test_what_is_not_given():
    def strategy(**given):
        settings = resolve_settings(DECODERS["fast_dllm"], SAME, given)
        return settings.remasking_strategy

    assert strategy() == strategy(threshold=0.5) == "confidence_threshold"
    assert strategy(factor=1.0) == "factor"
    assert strategy(entropy_threshold=0.4) == "entropy_threshold"
    assert set(fast_dllm.STRATEGIES) == {*STRATEGIES, "factor_script"}


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        (CONFIG, {}, ["attention='block_causal'"]),
        (SAME, {"cache": "triple"}, ["cache='triple'", "none, prefix, dual"]),
        (SAME, {"cache": "dual", "block_length": 0}, ["cache='dual'", "block_length"]),
        (SAME, {"factor": 1.0, "threshold": 0.5}, ["threshold=0.5", "'factor'"]),
        (SAME, {"factor": -1.0}, ["factor=-1.0", "at least 0"]),
        (SAME, {"threshold": float("nan")}, ["threshold=nan"]),
        (SAME, {"eb_threshold": 0.1}, ["eb_threshold=0.1", "eb_sampler"]),
        (SAME, {"strategy": "margin", "threshold": 0.5}, ["threshold=0.5", "'margin'"]),
        (SAME, {"denoising_steps": 4}, ["denoising_steps=4", "low_confidence"]),
        (SAME, {"strategy": "entropy", "eps": 1.0}, ["eps=1.0", "[0, 1)"]),
        (
            SAME,
            {"strategy": "entropy", "cache": "none", "block_length": 0},
            ["denoising_steps=0", "block_length=0"],
        ),
        (SAME, {"remasking_strategy": "random"}, ["'random'", "low_entropy"]),
        (SAME, {"top_k": 3}, ["top_k=3", "temperature > 0"]),
    ],
)
def test_wrong_settings_are_named(config, given, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS["fast_dllm"], config, given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_the_mask_token_is_never_written(models):
    model = models["same"]
    table = random_table(2, {MASK: 6.0})
    model.params, before = jnp.asarray(table), model.params
    try:
        outs = generate(
            model, prompts_of((3, 8)), "fast_dllm", max_new_tokens=14, block_length=6
        )
    finally:
        model.params = before
    assert all(MASK not in out.tokens for out in outs)
