"""The library's front door on the demo model: text, stops, streams, errors."""

import dataclasses
import json

import pytest

import dllm_jax
from dllm_jax.model import load_config
from dllm_jax.request import plan
from dllm_jax.training.problems import generate_problems, parse_answer

PROMPT = "Tom has 8 apples. He buys 5 more. He gives 3 to Ana. How many apples are left?"


@pytest.fixture(scope="module")
def model():
    return dllm_jax.load("demo")


@pytest.fixture(scope="module")
def output(model):
    return dllm_jax.generate(model, PROMPT)[0]


def test_output_fields(model, output):
    assert output.finish_reason == "eos"
    assert output.text == model.tokenizer.decode(output.tokens)
    assert len(output.confidence) == len(output.unmask_forward) == len(output.tokens)
    assert all(0.0 < c <= 1.0 for c in output.confidence)
    stats = output.stats
    assert stats.generated_tokens == len(output.tokens) + 1
    kinds = {k: n for k, n in stats.forwards.items() if k != "total"}
    assert stats.forwards["total"] == sum(kinds.values())
    assert stats.tokens_per_forward == stats.generated_tokens / stats.forwards["total"]
    # The last forward that unmasked a returned token is among those counted.
    assert max(output.unmask_forward) < stats.forwards["denoise"]
    assert json.loads(json.dumps(output.to_dict())) == dataclasses.asdict(output)


def test_trace_tells_what_was_unmasked_when_and_why(model, output):
    [traced] = dllm_jax.generate(model, PROMPT, trace=True)
    assert output.trace is None
    assert dataclasses.replace(traced, trace=None, stats=output.stats) == output
    assert json.loads(json.dumps(traced.to_dict()))["trace"] == traced.trace
    returned = traced.trace[: len(output.tokens)]
    begin = output.stats.prompt_tokens
    assert [r["slot"] for r in returned] == [begin + i for i in range(len(returned))]
    assert [r["token"] for r in returned] == output.tokens
    assert [r["forward"] for r in returned] == output.unmask_forward
    assert [r["confidence"] for r in returned] == output.confidence
    assert {r["rule"] for r in traced.trace} == {"low_confidence_dynamic"}
    with pytest.raises(ValueError, match="trace=1 must be True or False"):
        dllm_jax.generate(model, PROMPT, trace=1)


def test_length_is_a_finish_reason(model, output):
    short = dllm_jax.generate(model, PROMPT, max_new_tokens=5)[0]
    assert short.finish_reason == "length"
    assert len(short.tokens) == 5 == short.stats.generated_tokens


def test_single_ids_and_text_agree(model, output):
    ids = model.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    assert dllm_jax.generate(model, ids)[0].tokens == output.tokens
    assert dllm_jax.generate(model, [ids, PROMPT])[1].tokens == output.tokens


def test_batch_size_changes_nothing(model):
    prompts = [f"Ana has {n} coins. She finds 4. How many?" for n in range(3, 8)]
    whole = dllm_jax.generate(model, prompts)
    parts = dllm_jax.generate(model, prompts, batch_size=2)
    assert [o.tokens for o in whole] == [o.tokens for o in parts]


@pytest.mark.parametrize("decoder", ["ar", "block"])
def test_stream_joins_to_the_text(model, decoder):
    text = dllm_jax.generate(model, PROMPT, decoder)[0].text
    pieces = list(dllm_jax.stream(model, PROMPT, decoder))
    assert "".join(pieces) == text
    assert len(pieces) > 1


@pytest.mark.parametrize("stop", ["####", "=", [".", "="], "never there"])
def test_stop_strings(model, output, stop):
    [stopped] = dllm_jax.generate(model, [PROMPT], stop=stop)
    stops = [stop] if isinstance(stop, str) else stop
    found = [output.text.index(s) for s in stops if s in output.text]
    if found:
        assert stopped.text == output.text[: min(found)]
        assert stopped.finish_reason == "stop"
        assert output.tokens[: len(stopped.tokens)] == stopped.tokens
    else:
        assert stopped.text == output.text
        assert stopped.finish_reason == "eos"
    assert "".join(dllm_jax.stream(model, PROMPT, stop=stop)) == stopped.text


def test_sampling_needs_a_seed_and_nothing_else(model):
    settings = {"temperature": 4.0, "max_new_tokens": 24}
    one = dllm_jax.generate(model, PROMPT, seed=1, **settings)[0].tokens
    assert one == dllm_jax.generate(model, PROMPT, seed=1, **settings)[0].tokens
    assert one != dllm_jax.generate(model, PROMPT, seed=2, **settings)[0].tokens


def test_the_demo_solves_problems(model):
    """A share of the benchmark's 200 problems; the README has the whole table."""
    problems = [p for p, _ in zip(generate_problems("test", 11), range(32), strict=False)]
    outputs = dllm_jax.generate(
        model, [p.question for p in problems], "ar", max_new_tokens=80
    )
    right = [
        parse_answer(o.text) == p.answer for o, p in zip(outputs, problems, strict=True)
    ]
    assert sum(right) >= 0.8 * len(right)


def test_the_mask_tokens_text_is_ordinary_text(model):
    prompt = "Tom has <|MASK|> apples"
    ids = model.tokenizer.encode(prompt)
    assert model.config.mask_id not in ids
    assert model.tokenizer.decode(ids) == prompt
    assert dllm_jax.generate(model, prompt)[0].stats.prompt_tokens > 0


def test_steps_in_all_are_spread_over_blocks():
    config = load_config("demo")
    request = plan(config, "block", max_new_tokens=64, block_length=8, steps=32)
    assert request.settings.denoising_steps == 4
    with pytest.raises(ValueError, match="steps=30 cannot be spread"):
        plan(config, "block", max_new_tokens=64, block_length=8, steps=30)
    with pytest.raises(ValueError, match="both given"):
        plan(config, "block", max_new_tokens=64, steps=32, denoising_steps=4)


def test_presets_are_settings():
    request = plan(load_config("demo"), preset="sdar-static", max_new_tokens=8)
    assert request.settings.remasking_strategy == "low_confidence_static"
    assert plan(
        load_config("demo"), preset="sdar-dynamic", threshold=0.7
    ).settings.threshold == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"decoder": "fast"}, ["decoder='fast'", "ar", "block"]),
        ({"preset": "none"}, ["preset='none'", "sdar-static"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"max_new_tokens": True}, ["max_new_tokens=True"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"stop": ""}, ["stop="]),
        ({"stop_ids": [9999]}, ["stop_ids=", "9999"]),
        ({"thresold": 0.5}, ["thresold=0.5", "Did you mean threshold?"]),
        ({"threshold": 0.5, "confidence_threshold": 0.6}, ["threshold is given twice"]),
        ({"remasking_strategy": "best"}, ["remasking_strategy='best'", "sequential"]),
        ({"decoder": "ar", "block_length": 4}, ["block_length=4", "'ar'"]),
    ],
)
def test_wrong_settings_are_named(arguments, words):
    """Checked against the config alone: no weight is loaded."""
    with pytest.raises(ValueError) as caught:
        plan(load_config("demo"), **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_bidirectional_model_is_refused_clearly():
    with pytest.raises(ValueError, match="needs block-causal attention"):
        plan(load_config("demo-llada"), "block")


def test_unknown_models():
    with pytest.raises(ValueError, match="model='nowhere'"):
        dllm_jax.load("nowhere")
    with pytest.raises(ValueError, match="python -m convert org/name"):
        dllm_jax.load("org/name")
    with pytest.raises(ValueError, match="dtype='int4'"):
        dllm_jax.load("demo", dtype="int4")


def test_stop_strings_leave_the_other_rows_alone(model):
    """Rows end on their own: by stop string, by end token, and a row that only fills up."""
    prompts = [
        PROMPT,
        "Ana has 9 pens. She finds 4. She buys 6 more. How many pens?",
        PROMPT,
    ]
    for stop in ("####", "never there"):
        batch = dllm_jax.generate(model, prompts, stop=stop)
        for prompt, out in zip(prompts, batch, strict=True):
            [alone] = dllm_jax.generate(model, [prompt], stop=stop)
            assert out.text == alone.text
            assert out.finish_reason == alone.finish_reason
