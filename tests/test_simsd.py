"""SimSD's promises beyond the released traces: exactness, batches, ablations, errors."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny import (
    CONFIG,
    MASK,
    ScriptedModel,
    quick_compilation,
    random_table,
    tiny_model,
)

from dllm_jax import generate, load
from dllm_jax.decoding.base import DECODERS
from dllm_jax.decoding.block import STRATEGIES as EVERY_STRATEGY
from dllm_jax.model import Model
from dllm_jax.request import plan
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
@pytest.mark.parametrize("chosen", _STRATEGIES.values(), ids=_STRATEGIES)
def test_exact_verification_is_the_targets_own_decoding(target, drafters, drafter, chosen):
    """Token for token, and in no more forwards of the target, whatever drafts."""
    prompts = prompts_of(3, 21, 8)
    request = {"max_new_tokens": 18, "block_length": 6, **chosen}
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


_WAYS = [(strategy, 0.0) for strategy in EVERY_STRATEGY]
_WAYS += [("low_confidence_dynamic", 0.9), ("random", 1.5)]


@pytest.fixture(scope="module")
def scripted():
    """A target and a drafter without floats; the tables are inputs of their programs."""
    return ScriptedModel(random_table(0)), ScriptedModel(random_table(1))


@pytest.mark.parametrize(("strategy", "temperature"), _WAYS)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_drafter_leaves_the_targets_decoding(scripted, strategy, temperature, data):
    """Greedy and sampled, whatever is drafted, in whatever chunks: the target's tokens."""
    target, drafter = scripted
    likeness = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), "likeness")
    noise = random_table(data.draw(st.integers(1, 3), "drafter"))
    drafter.params = jnp.asarray(
        likeness * target.params + (1 - likeness) * noise, jnp.float32
    )
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=2), "prompts")
    request = {
        "max_new_tokens": data.draw(st.integers(1, 20), "max_new_tokens"),
        "block_length": 6,
        "remasking_strategy": strategy,
        "temperature": temperature,
        "denoising_steps": data.draw(st.integers(1, 7), "denoising_steps"),
        "threshold": data.draw(st.sampled_from([0.2, 0.5, 0.9]), "threshold"),
        "eb_threshold": data.draw(st.sampled_from([0.3, 2.0]), "eb_threshold"),
        "seed": data.draw(st.integers(0, 9), "seed"),
        "stop_ids": data.draw(st.sampled_from([(), (3, 7)]), "stop_ids"),
    }
    drafting = {
        "draft_threshold": data.draw(st.sampled_from([0.0, 0.1, 0.6]), "draft_threshold"),
        "num_draft_tokens": data.draw(st.integers(0, 4), "num_draft_tokens"),
        "draft_steps_per_block": data.draw(st.integers(0, 3), "draft_steps"),
    }
    prompts = prompts_of(*lengths)
    with quick_compilation():
        want = generate(target, prompts, "block", **request)
        got = generate(
            target,
            prompts,
            "simsd",
            draft_model=drafter,
            verification="exact",
            **request,
            **drafting,
        )
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert one.stats.forwards["verify"] <= other.stats.forwards["denoise"]
        assert one.stats.more["forwards_of_target_alone"] >= other.stats.forwards["denoise"]


def test_sampled_exact_verification_has_the_targets_distribution(scripted):
    """Against runs of the target alone with other seeds, by chi-square; and it pays."""
    target, drafter = scripted
    drafter.params = jnp.asarray(0.7 * random_table(0) + 0.3 * random_table(1), jnp.float32)
    rows, request = 512, {"max_new_tokens": 4, "block_length": 4, "temperature": 0.7}
    prompts = prompts_of(8) * rows
    pair = {"draft_model": drafter, "verification": "exact"}
    with quick_compilation():
        got = generate(target, prompts, "simsd", seed=1, stop_ids=(), **request, **pair)
        want = generate(target, prompts, "block", seed=2, stop_ids=(), **request)
    for slot in range(4):
        counts = np.array(
            [
                np.bincount([o.tokens[slot] for o in outs], minlength=MASK)
                for outs in (got, want)
            ]
        )
        often = counts.sum(axis=0) >= 10
        table = np.column_stack([counts[:, often], counts[:, ~often].sum(axis=1)])
        assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 1e-4
    rounds = np.mean([out.stats.forwards["verify"] for out in got])
    assert rounds < 0.9 * np.mean([out.stats.forwards["denoise"] for out in want])


def test_self_speculation(target, drafters):
    """The model drafts for itself, several slots a forward, and checks them exactly."""
    prompts, request = prompts_of(8), {"max_new_tokens": 18, "block_length": 6}
    request |= {"remasking_strategy": "low_confidence_static"}
    [want] = generate(target, prompts, "block", **request)
    request |= {"draft_model": drafters["itself"], "verification": "exact"}
    [slow] = generate(target, prompts, "simsd", **request)
    [fast] = generate(target, prompts, "simsd", **request, draft_threshold=0.2)
    assert slow.tokens == fast.tokens == want.tokens
    assert fast.stats.forwards["draft"] < slow.stats.forwards["draft"]
    assert fast.stats.more["draft_cost"] == 1.0


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
    assert counts.max() == 3  # two drafted slots, and the target's own step behind them


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


def test_drafters_of_one_shape_have_programs_of_their_own(target, drafters):
    """What a drafter keeps its keys in is part of the programs, not of their inputs."""
    small, request = drafters["small"], {"max_new_tokens": 6, "block_length": 6}
    other = Model(small.params, small.config, kv_dtype=jnp.int8)
    generate(target, prompts_of(9), "simsd", draft_model=small, **request)
    before = target.num_traces
    generate(target, prompts_of(9), "simsd", draft_model=other, **request)
    assert target.num_traces == before + 2
    assert target.state.draft.cache.k.dtype == jnp.int8


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


def test_what_the_paired_row_lives_on(target, drafters):
    """Mask copies elsewhere, another order, data without masks: fewer drafts pass.

    The model drafts for itself: what it then rejects, the row has distorted.
    """
    prompts = prompts_of(*range(8, 24))
    request = {"max_new_tokens": 24, "block_length": 6}
    request |= {"draft_model": drafters["itself"]}
    forwards = {}
    for ablation in ("none", "own_positions", "blind_data", "reversed_order"):
        outs = generate(target, prompts, "simsd", **request, ablation=ablation)
        forwards[ablation] = sum(out.stats.forwards["verify"] for out in outs)
    assert forwards["own_positions"] > 1.5 * forwards["none"]
    assert forwards["reversed_order"] > 1.5 * forwards["none"]
    assert forwards["blind_data"] > 1.1 * forwards["none"]


def test_what_a_pair_is_worth(demos):
    """The drafter's cost by its bytes, and the forwards that the target alone needs."""
    model, drafter = demos
    prompt = "Ana has 5 coins. She finds 4. How many?"
    request = {"remasking_strategy": "sequential", "max_new_tokens": 40}
    [alone] = generate(model, [prompt], "block", **request)
    pair = {"draft_model": drafter, "verification": "exact"}
    [out] = generate(model, [prompt], "simsd", **request, **pair)
    more, forwards = out.stats.more, out.stats.forwards
    assert 0.1 < more["draft_cost"] < 0.4
    assert more["forwards_of_target_alone"] >= alone.stats.forwards["denoise"]
    cost = forwards["verify"] + forwards["draft"] * more["draft_cost"]
    assert more["expected_speedup"] == pytest.approx(
        more["forwards_of_target_alone"] / cost
    )
    assert more["expected_speedup"] > 1.0


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"acceptance": "mrs"}, ["acceptance='mrs'", "temperature > 0"]),
        ({"acceptance": "greedy_match", "temperature": 1.0}, ["greedy_match", "0"]),
        ({"verification": "exact", "draft_blocks": 2}, ["draft_blocks=2", "exact"]),
        ({"verification": "exact", "acceptance": "mrs"}, ["acceptance='mrs'", "exact"]),
        ({"verification": "exact", "ablation": "blind_data"}, ["blind_data", "exact"]),
        ({"acceptance": "replay"}, ["acceptance='replay'", "paired"]),
        ({"draft_threshold": 0.5}, ["draft_threshold=0.5", "paired"]),
        ({"ablation": "blind_data", "draft_blocks": 2}, ["blind_data", "draft_blocks=1"]),
        ({"remasking_strategy": "sequential"}, ["'sequential'", "exact"]),
        ({"verification": "both"}, ["'both'", "paired, exact"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens=-1"]),
        ({"block_length": 0}, ["block_length=0"]),
    ],
)
def test_wrong_settings_are_named(chosen, words):
    with pytest.raises(ValueError) as error:
        resolve_settings(DECODERS["simsd"], CONFIG, chosen)
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
