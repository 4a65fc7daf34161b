"""A row of a batch gets what its prompt gets alone: every family, every decoder."""

import functools

import numpy as np
import pytest

from dllm_jax import generate, load

_MASK_ID = 253  # of the families whose files do not say it
_LENGTHS = (3, 41, 17)  # of no, several and broken blocks
_HYSTERESIS = {
    "do_verify_policy": "score_hysteresis",
    "token_acceptance_estimator": "soft_renyi_2_entropy",
    "score_penalty_coef": 1.0,
    "temperature": 1.0,
}
CASES = [
    ("sdar", "ar", {}),
    ("sdar", "block", {"block_length": 8}),
    ("sdar_moe", "block", {"threshold": 0.6}),
    ("llada", "masked", {"block_length": 8, "denoising_steps": 3}),
    ("llada", "fast_dllm", {"block_length": 8, "cache": "prefix", "threshold": 0.6}),
    ("llada", "klass", {"block_length": 8, "threshold": 0.6, "kl_threshold": 0.05}),
    ("llada", "wino", {"block_length": 16, "threshold": 0.3, "threshold_back": 0.95}),
    ("llada", "credit", {"block_length": 8}),
    ("llada", "leap", {"block_length": 8, "threshold": 0.8, "tau": 0.3}),
    ("dream", "leap", {"block_length": 8, "cache": "dual", "tau": 0.3}),
    ("sdar", "leap", {"block_length": 8, "tau": 0.3}),
    ("dream", "klass", {"block_length": 0, "threshold": 0.6, "kl_threshold": 0.05}),
    ("dream", "masked", {"remasking_strategy": "entropy", "denoising_steps": 9}),
    ("dream", "fast_dllm", {"block_length": 8, "cache": "dual", "threshold": 0.6}),
    ("fast_dllm_v2", "fast_dllm_v2", {}),
    ("llada2", "block", {}),
    ("llada2", "edit", {"threshold": 0.7, "editing_threshold": 0.5}),
    ("sdar", "s2d2", {"block_length": 8, **_HYSTERESIS}),
    ("sdar", "simsd", {"block_length": 8}),
    ("fast_dllm_v2", "s2d2", {"do_verify_policy": "contextual_bandit_ucb"}),
]


@pytest.fixture(scope="module")
def models(golden_dir):
    def get(family):
        unknown = family in ("fast_dllm_v2", "llada2")
        mask_id = _MASK_ID if unknown else None
        return load(str(golden_dir / family), dtype="float32", mask_id=mask_id)

    return functools.cache(get)


@pytest.mark.parametrize(
    ("family", "decoder", "settings"), CASES, ids=[f"{f}-{d}" for f, d, _ in CASES]
)
def test_a_batch_of_mixed_lengths(models, family, decoder, settings):
    model = models(family)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 200, length).tolist() for length in _LENGTHS]
    run = functools.partial(generate, model, decoder=decoder, max_new_tokens=21)
    if decoder == "simsd":
        settings = {**settings, "draft_model": model}
    together = run(prompts, seed=[0] * len(prompts), **settings)
    for prompt, out in zip(prompts, together, strict=True):
        [alone] = run([prompt], seed=[0], **settings)
        assert out.tokens == alone.tokens
        assert out.unmask_forward == alone.unmask_forward
        assert out.stats.forwards == alone.stats.forwards
        assert out.stats.positions == alone.stats.positions
        np.testing.assert_allclose(out.confidence, alone.confidence, atol=1e-4)
