"""SimSD's promises beyond the released traces: exactness, batches, ablations, errors."""

import dataclasses
import functools

import numpy as np
import pytest
from tiny import CONFIG, MASK, tiny_model

from dllm_jax import generate, load
from dllm_jax.decoding.base import DECODERS
from dllm_jax.generate import plan
from dllm_jax.settings import resolve_settings

_STRATEGIES = {
    "static": {"remasking_strategy": "low_confidence_static"},
    "two steps": {"remasking_strategy": "low_confidence_static", "denoising_steps": 2},
    "dynamic": {"remasking_strategy": "low_confidence_dynamic", "threshold": 0.4},
    "entropy": {"remasking_strategy": "entropy_bounded", "eb_threshold": 2.0},
    "sequential": {"remasking_strategy": "sequential"},
}


@pytest.fixture(scope="module")
def target():
    return tiny_model(0)


@pytest.fixture(scope="module")
def drafters(target):
    other = dataclasses.replace(CONFIG, num_layers=1, num_heads=2, head_dim=16)
    return {"small": tiny_model(1, other), "itself": target}


def prompts_of(*lengths) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, MASK - 5, length).tolist() for length in lengths]


@pytest.mark.parametrize("drafter", ["small", "itself"])
@pytest.mark.parametrize("given", _STRATEGIES.values(), ids=_STRATEGIES)
def test_exact_verification_is_the_targets_own_decoding(target, drafters, drafter, given):
    """Token for token, and in no more forwards of the target, whatever drafts."""
    prompts = prompts_of(3, 21, 8)
    request = {"max_new_tokens": 18, "block_length": 6, **given}
    want = generate(target, prompts, "block", **request)
    got = generate(
        target,
        prompts,
        "simsd",
        draft_model=drafters[drafter],
        verification="exact",
        **request,
    )
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.confidence, other.confidence, atol=1e-4)
        assert one.stats.forwards["verify"] <= other.stats.forwards["denoise"]
        assert one.finish_reason == other.finish_reason
    if drafter == "itself":
        # All it drafts is accepted: a verification a block.
        assert all(o.stats.forwards["verify"] <= 5 for o in got)


@pytest.mark.parametrize("more", [{"verification": "exact"}, {}, {"temperature": 0.8}])
def test_a_row_gets_what_its_prompt_gets_alone(target, drafters, more):
    run = functools.partial(
        generate,
        target,
        decoder="simsd",
        draft_model=drafters["small"],
        max_new_tokens=14,
        block_length=6,
        **more,
    )
    prompts = prompts_of(3, 40, 17)
    together = run(prompts, seed=[1, 2, 3])
    for index, (prompt, out) in enumerate(zip(prompts, together, strict=True)):
        [alone] = run([prompt], seed=[1 + index])
        assert (alone.tokens, alone.unmask_forward) == (out.tokens, out.unmask_forward)
        assert alone.stats.forwards == out.stats.forwards
        assert alone.stats.positions == out.stats.positions
        assert MASK not in out.tokens


def test_short_drafts(target, drafters):
    """`num_draft_tokens` bounds what a round can commit, not what comes out."""
    prompts, request = prompts_of(5), {"max_new_tokens": 12, "block_length": 6}
    request |= {"draft_model": drafters["itself"], "verification": "exact"}
    [whole] = generate(target, prompts, "simsd", **request)
    [short] = generate(target, prompts, "simsd", **request, num_draft_tokens=2)
    assert short.tokens == whole.tokens
    assert short.stats.forwards["verify"] > whole.stats.forwards["verify"]
    counts = np.bincount(short.unmask_forward)
    assert counts.max() <= 2


def test_early_stopped_drafts_are_completed_by_the_target(target, drafters):
    prompts, request = prompts_of(5), {"max_new_tokens": 12, "block_length": 6}
    request |= {"draft_model": drafters["small"]}
    [whole] = generate(target, prompts, "simsd", **request)
    [early] = generate(target, prompts, "simsd", **request, draft_steps_per_block=1)
    assert MASK not in early.tokens and len(early.tokens) == 12
    assert early.stats.forwards["draft"] < whole.stats.forwards["draft"]
    assert early.stats.forwards["verify"] <= whole.stats.forwards["verify"]


def test_several_blocks_a_verification(target, drafters):
    """A model that drafts for itself gets more of its blocks through at once."""
    prompts = prompts_of(4, 16)  # whole blocks: known tokens do not look at drafted ones
    run = functools.partial(
        generate,
        target,
        decoder="simsd",
        draft_model=drafters["itself"],
        max_new_tokens=24,
        block_length=4,
        denoising_steps=1,
    )
    one, three = run(prompts), run(prompts, draft_blocks=3)
    for single, several, prompt in zip(one, three, prompts, strict=True):
        # A step a block: nothing leaks into what is judged, and all is accepted.
        assert several.tokens == single.tokens
        assert several.stats.more["acceptance"] == single.stats.more["acceptance"] == 1.0
        verified = several.stats.forwards["verify"]
        assert verified < single.stats.forwards["verify"] <= 3 * verified
        [alone] = run([prompt], draft_blocks=3)
        assert alone.tokens == several.tokens
        assert alone.stats.positions == several.stats.positions


def test_a_mixture_of_experts_drafts_for_itself(golden_dir):
    """LLaDA2: block-causal too, and a block of its own length."""
    model = load(str(golden_dir / "llada2"), dtype="float32", mask_id=253)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 200, length).tolist() for length in (5, 20)]
    request = {"max_new_tokens": 14, "block_length": 8}
    request |= {"remasking_strategy": "low_confidence_dynamic", "threshold": 0.5}
    own = generate(model, prompts, "block", **request)
    exact = {"draft_model": model, "verification": "exact"}
    drafted = generate(model, prompts, "simsd", **exact, **request)
    assert [out.tokens for out in drafted] == [out.tokens for out in own]


@pytest.fixture(scope="module")
def demos():
    return load("demo"), load("demo-draft")


def test_the_position_copy_matters(demos):
    """Without it mask copies stand elsewhere, and hardly a draft is accepted."""
    model, drafter = demos
    prompts = [f"Ana has {n} coins. She finds 4. How many?" for n in range(3, 11)]
    run = functools.partial(
        generate, model, prompts, "simsd", draft_model=drafter, max_new_tokens=32
    )
    forwards = [
        sum(out.stats.forwards["verify"] for out in run(share_mask_position=share))
        for share in (True, False)
    ]
    assert forwards[1] > 1.5 * forwards[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"acceptance": "mrs"}, ["acceptance='mrs'", "temperature > 0"]),
        ({"acceptance": "greedy_match", "temperature": 1.0}, ["greedy_match", "0"]),
        ({"verification": "exact", "temperature": 1.0}, ["temperature=1.0", "exact"]),
        ({"remasking_strategy": "sequential"}, ["'sequential'", "exact"]),
        ({"verification": "both"}, ["'both'", "paired, exact"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens=-1"]),
        ({"block_length": 0}, ["block_length=0"]),
    ],
)
def test_wrong_settings_are_named(given, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS["simsd"], CONFIG, given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_models_that_do_not_fit(target, drafters):
    [prompt] = prompts_of(3)
    with pytest.raises(ValueError, match="needs draft_model"):
        generate(target, [prompt], "simsd")
    with pytest.raises(ValueError, match="not used by decoder 'block'"):
        generate(target, [prompt], "block", draft_model=drafters["small"])
    other = tiny_model(2, dataclasses.replace(CONFIG, mask_id=MASK - 8))
    with pytest.raises(ValueError, match=r"mask_id=55, the model mask_id=63"):
        generate(target, [prompt], "simsd", draft_model=other)
    bidirectional = dataclasses.replace(CONFIG, attention="bidirectional")
    with pytest.raises(ValueError, match="block-causal"):
        plan(bidirectional, "simsd")
