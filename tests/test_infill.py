"""Infilling: holes are filled in place, the given tokens stay, both sides are seen."""

import dataclasses
import functools

import numpy as np
import pytest
from tiny import CONFIG, EOS, MASK, ScriptedModel, random_table, table_row, token_code

import dllm_jax
from dllm_jax.decode import main
from dllm_jax.generate import generate, infill
from dllm_jax.prompts import encode_holes
from dllm_jax.request import plan_infill

SAME = dataclasses.replace(CONFIG, attention="bidirectional")
SHIFTED = dataclasses.replace(SAME, logit_alignment="shifted")
TABLE = random_table(4)
DECODERS = {
    "masked": {"decoder": "masked"},
    "masked in blocks": {"decoder": "masked", "block_length": 4},
    "masked, entropy": {"decoder": "masked", "remasking": "entropy", "denoising_steps": 5},
    "exact": {"decoder": "fast_dllm", "block_length": 4, "cache": "none"},
    "prefix": {"decoder": "fast_dllm", "block_length": 4, "cache": "prefix"},
    "dual": {"decoder": "fast_dllm", "block_length": 4, "cache": "dual"},
}
every_decoder = pytest.mark.parametrize("given", DECODERS.values(), ids=DECODERS)
both = pytest.mark.parametrize("config", [SAME, SHIFTED], ids=["same", "shifted"])


@pytest.fixture(scope="module")
def models():
    return functools.cache(lambda config: ScriptedModel(TABLE, config))


@pytest.fixture(scope="module")
def demo():
    return dllm_jax.load("demo-llada")


def text_with_holes(length: int, holes: list[int], seed: int = 0) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, MASK, length)
    ids[holes] = MASK
    return ids.tolist()


TEXTS = [
    text_with_holes(12, [2, 3, 7]),
    text_with_holes(30, [*range(4, 21), 28], 1),  # blocks with and without given tokens
    text_with_holes(9, [0, 8], 2),  # both ends
    text_with_holes(5, [0, 1, 2, 3, 4], 3),  # nothing given
    text_with_holes(40, [3, 39], 4),  # whole blocks between the holes have no mask
]


@both
@every_decoder
def test_holes_are_filled_and_the_rest_stands_still(models, config, given):
    model = models(config)
    together = infill(model, TEXTS, **given)
    for ids, out in zip(TEXTS, together, strict=True):
        holes = [i for i, token in enumerate(ids) if token == MASK]
        assert len(out.tokens) == len(ids) and MASK not in out.tokens
        for index, token in enumerate(ids):
            given_token = index not in holes
            assert not given_token or out.tokens[index] == token
            assert (out.unmask_forward[index] == -1) == given_token
            assert (out.confidence[index] == 1.0) == given_token
        assert out.finish_reason == "filled"
        assert out.stats.generated_tokens == len(holes)
        assert out.stats.prompt_tokens == len(ids) - len(holes)
        # A forward fills a hole at least: blocks without one cost nothing.
        assert out.stats.forwards["total"] <= len(holes)
        assert max(out.unmask_forward) + 1 == out.stats.forwards["denoise"]
        [alone] = infill(model, [ids], **given)
        assert dataclasses.replace(alone, stats=None) == dataclasses.replace(
            out, stats=None
        )


@both
def test_every_hole_sees_both_sides(models, config):
    """The most confident hole first, from a sum over the whole text."""
    model, [ids] = models(config), [text_with_holes(14, [2, 6, 11], 7)]
    canvas, position = np.array(ids), np.arange(14)
    order = {}
    while (canvas == MASK).any():
        rows = table_row(token_code(canvas, position).sum(), position)
        if config is SHIFTED:
            rows = np.concatenate([rows[:1], rows[:-1]])
        p = np.exp(TABLE[rows].astype(np.float64))
        p /= p.sum(axis=-1, keepdims=True)
        token = p[:, :MASK].argmax(axis=-1)
        score = np.where(canvas == MASK, p[position, token], -1.0)
        slot = int(score.argmax())
        canvas[slot], order[slot] = token[slot], len(order)
    [out] = infill(model, [ids], "masked")
    assert out.tokens == canvas.tolist()
    assert {i: n for i, n in enumerate(out.unmask_forward) if n >= 0} == order


@every_decoder
def test_a_hole_at_the_end_is_a_generation(models, given):
    model, prompt = models(SAME), text_with_holes(11, [], 5)
    [filled] = infill(model, [[*prompt, *[MASK] * 9]], **given)
    request = {"max_new_tokens": 9, "stop_ids": (), **given}
    [generated] = generate(model, [prompt], **request)
    assert filled.tokens == [*prompt, *generated.tokens]
    assert filled.unmask_forward[11:] == generated.unmask_forward


def test_end_tokens_in_the_text_end_nothing(models):
    model = models(SAME)
    model.params, before = model.params.at[:, EOS].add(30.0), model.params
    try:
        [out] = infill(model, [[EOS, MASK, MASK, 5, MASK, EOS]], "masked", block_length=2)
    finally:
        model.params = before
    assert out.tokens == [EOS, EOS, EOS, 5, EOS, EOS]
    assert out.finish_reason == "filled"


def test_markers_in_text(demo):
    config, tokenizer = demo.config, demo.tokenizer
    mask_id = config.mask_id

    def row(text, marker="[MASK]"):
        return encode_holes(config, tokenizer, text, marker)

    assert row("Ana has [MASK] coins.").ids.count(mask_id) == 1
    assert row("Ana [MASK:12] coins [MASK][MASK]").ids.count(mask_id) == 14
    assert row("Ana <?:3> [MASK]", "<?>").ids.count(mask_id) == 3
    before, behind = "Ana has ", " coins."
    ids = row(f"{before}[MASK:2]{behind}").ids
    first = tokenizer.encode(before)
    assert ids[: len(first)] == first
    assert ids[len(first) :] == [mask_id] * 2 + tokenizer.encode(behind, False)
    assert row("[MASK]").start == row("[MASK]").ids.index(mask_id)


@pytest.mark.parametrize(
    ("prompt", "given", "words"),
    [
        ("no hole", {}, ["no hole", "[MASK]", "[MASK:n]"]),
        ([1, 2], {}, ["no hole", "mask id"]),
        ([1, 2, 10**6], {}, ["1000000", "vocabulary"]),
        ("[MASK:0]", {}, ["no hole"]),
        ("[MASK:99999]", {}, ["exceeds", "positions"]),
        ("a [MASK]", {"marker": "?"}, ["marker='?'", "two characters"]),
        ("a [MASK]", {"stop": "x"}, ["stop='x'"]),
        ("a [MASK]", {"decoder": "block"}, ["bidirectional"]),
        (1.5, {}, ["1.5"]),
    ],
)
def test_what_cannot_be_filled(demo, prompt, given, words):
    with pytest.raises((ValueError, TypeError)) as error:
        infill(demo, [prompt], **given)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_block_causal_models_say_what_they_can_do():
    with pytest.raises(ValueError, match=r"sees what follows.*block_causal.*generate"):
        plan_infill(CONFIG)


def test_the_length_of_the_text_is_what_counts():
    """Neither the usual number of new tokens nor a preset's must fit the model."""
    small = dataclasses.replace(SAME, max_positions=32)
    for given in ({}, {"preset": "klass-llada-gsm8k"}):
        [out] = infill(ScriptedModel(TABLE, small), [[1, MASK, 3]], **given)
        assert len(out.tokens) == 3


def test_command_line(capsys):
    text = "A bag holds [MASK] red and [MASK:2] blue balls."
    arguments = ["--model", "demo-llada", "--infill", "--prompt", text]
    assert main([*arguments, "--compile-cache", "none"]) == 0
    done = capsys.readouterr()
    assert done.out.startswith("A bag holds ") and "MASK" not in done.out
    assert "infill=[MASK]" in done.err and "filled" in done.err
    for more, words in (
        (["--max-new-tokens", "4"], "max_new_tokens"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--marker", "?"], "marker='?'"),
        (["--stream"], "no --infill"),
        (["--model", "demo"], "block_causal"),
    ):
        assert main([*arguments, *more]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert main(["--marker", "??", "--prompt", "x"]) == 2
    assert "--infill" in capsys.readouterr().err
