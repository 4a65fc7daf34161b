"""Log-probabilities of tokens: when they were unmasked, and in the finished text."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, EOS, MASK, PAD, VOCAB, ScriptedModel

from dllm_jax import generate, infill, load
from dllm_jax.decode import main
from dllm_jax.likelihood import token_log_probs

_PROMPTS = [[3, 141, 59, 26, 5], [35, 89, 79]]
PROMPT = [5, 6, 7]
_MORE = {"max_new_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def models(golden_dir):
    return {
        family: load(str(golden_dir / family), dtype="float32")
        for family in ("sdar", "llada", "dream")
    }


@pytest.mark.parametrize(
    ("family", "decoder"),
    [
        ("sdar", "block"),
        ("sdar", "s2d2"),
        ("llada", "fast_dllm"),
        ("llada", "masked"),
        ("dream", "klass"),
    ],
)
def test_both_are_what_they_are_called(models, family, decoder):
    """At commit the log of the confidence; re-scored what the finished text gives."""
    model = models[family]
    more = {**_MORE, "stop_ids": []}
    plain = generate(model, _PROMPTS, decoder, **more)
    both = generate(model, _PROMPTS, decoder, logprobs="both", **more)
    rescored = token_log_probs(model, _PROMPTS, [out.tokens for out in plain])
    for before, out, values in zip(plain, both, rescored, strict=True):
        assert before.logprobs is None and before.tokens == out.tokens
        assert before.stats.forwards == out.stats.forwards
        assert list(out.logprobs) == ["commit", "rescored"]
        commit = np.log(out.confidence)
        np.testing.assert_allclose(out.logprobs["commit"], commit, rtol=1e-6)
        np.testing.assert_allclose(out.logprobs["rescored"], values, atol=1e-4)
        assert json.loads(json.dumps(out.to_dict()))["logprobs"] == out.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_from_left_to_right_both_are_the_same(models, temperature):
    """Token by token, what a token had when it was taken is what the text gives it."""
    for out in generate(
        models["sdar"], _PROMPTS, "ar", logprobs="both", temperature=temperature, **_MORE
    ):
        commit, rescored = out.logprobs["commit"], out.logprobs["rescored"]
        assert len(commit) == len(out.tokens) > 0
        np.testing.assert_allclose(commit, rescored, atol=1e-4)


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_on_a_mesh(models, golden_dir, family):
    more = {**_MORE, "stop_ids": [], "logprobs": "both"}
    divided = load(str(golden_dir / family), dtype="float32", mesh="data=2,tensor=2")
    outs = (generate(model, _PROMPTS, **more) for model in (models[family], divided))
    for one, other in zip(*outs, strict=True):
        assert one.tokens == other.tokens
        for kind, values in one.logprobs.items():
            np.testing.assert_allclose(other.logprobs[kind], values, atol=1e-4)


def test_of_holes_only(models):
    """Given tokens have 0; a filled one is judged by all the others."""
    model, ids = models["llada"], [3, 141, 59, 26, 5, 35, 89, 79]
    holes = [2, 5, 6]
    text = [model.config.mask_id if i in holes else t for i, t in enumerate(ids)]
    [out] = infill(model, text, logprobs="both")
    [values] = token_log_probs(model, [out.tokens[:1]], [out.tokens[1:]])
    given = [i for i in range(len(ids)) if i not in holes]
    for kind in ("commit", "rescored"):
        assert [out.logprobs[kind][i] for i in given] == [0.0] * len(given)
    got = [out.logprobs["rescored"][i] for i in holes]
    np.testing.assert_allclose(got, [values[i - 1] for i in holes], atol=1e-4)


def test_a_probability_of_0_is_still_json():
    """The mask token keeps its share, here all of it."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, MASK] = 200.0
    model = ScriptedModel(jnp.asarray(table))
    [out] = generate(model, PROMPT, max_new_tokens=4, logprobs="commit")
    assert out.confidence == [0.0] * 4
    np.testing.assert_allclose(out.logprobs["commit"], [-87.3365] * 4, rtol=1e-6)


def test_end_tokens_that_come_last_count_as_0():
    """As the decoder counts them, which is what the confidence is."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, EOS] = 200.0
    model = ScriptedModel(
        jnp.asarray(table), dataclasses.replace(CONFIG, attention="bidirectional")
    )
    more = {"max_new_tokens": 4, "stop_ids": [PAD], "confidence_eos_eot_inf": True}
    [out] = generate(model, PROMPT, "masked", logprobs="commit", **more)
    assert out.tokens == [EOS] * 4 and out.confidence == [0.0] * 4
    np.testing.assert_allclose(out.logprobs["commit"], [-87.3365] * 4, rtol=1e-6)


def test_a_stop_string_cuts_them(models):
    model = load("demo")
    prompt = "Ana has 3 pens. She buys 4 more. How many pens does Ana have now?"
    [whole] = generate(model, prompt, logprobs="both")
    stop = whole.text[6:9]
    [out] = generate(model, prompt, stop=stop, logprobs="both")
    assert out.finish_reason == "stop" and 0 < len(out.tokens) < len(whole.tokens)
    for values in out.logprobs.values():
        assert len(values) == len(out.tokens)
    n = len(out.tokens)
    assert out.logprobs["commit"] == whole.logprobs["commit"][:n]
    np.testing.assert_allclose(
        out.logprobs["rescored"], whole.logprobs["rescored"][:n], atol=1e-4
    )


def test_of_nothing(models):
    """An answer that is empty has none of either."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, EOS] = 9.0
    model = ScriptedModel(jnp.asarray(table))
    [out] = generate(model, PROMPT, max_new_tokens=4, logprobs="both")
    assert out.tokens == [] and out.logprobs == {"commit": [], "rescored": []}


def test_in_json_and_in_files(models, golden_dir, tmp_path, capsys):
    model = ["--model", str(golden_dir / "sdar"), "--dtype", "float32", "--quiet"]
    model += ["--compile-cache", "none", "--max-new-tokens", "12", "--seed", "3"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{prompt}\n" for prompt in _PROMPTS))
    files = [*model, "--input", str(source), "--output", str(out)]
    assert main([*files, "--logprobs", "both"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = generate(models["sdar"], _PROMPTS, logprobs="both", **_MORE)
    for record, output in zip(records, wanted, strict=True):
        for kind, values in output.logprobs.items():
            np.testing.assert_allclose(record["logprobs"][kind], values, atol=1e-4)
    # Another question than the one that was answered.
    assert main([*files, "--resume", "--logprobs", "commit"]) == 2
    assert "another prompt, model or setting" in capsys.readouterr().err
    ids = ",".join(map(str, _PROMPTS[0]))
    assert main([*model, "--prompt-ids", ids, "--json", "--logprobs", "rescored"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    got, want = json.loads(line)["logprobs"], wanted[0].logprobs["rescored"]
    np.testing.assert_allclose(got["rescored"], want, atol=1e-4)


def test_mistakes(models, capsys):
    with pytest.raises(ValueError, match="logprobs=True must be None or one of commit"):
        generate(models["sdar"], _PROMPTS, logprobs=True)
    assert main(["--prompt", "a", "--logprobs", "commit"]) == 2
    assert "logprobs='commit' needs --json or --output" in capsys.readouterr().err
