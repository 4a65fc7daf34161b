"""What went wrong elsewhere and had no test here yet, by its number in tests/README.md."""

import ast
import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from tiny import BOS, CONFIG, MASK, VOCAB, ScriptedModel, random_table, tiny_model

from dllm_jax import layouts
from dllm_jax.decoding import DECODERS
from dllm_jax.decoding.bidirectional import Window
from dllm_jax.decoding.block import fill_quota
from dllm_jax.decoding.fast_dllm import choose
from dllm_jax.generate import generate
from dllm_jax.sampling import Proposal
from dllm_jax.settings import resolve_settings

HERE = Path(__file__).parent
BIDIRECTIONAL = dataclasses.replace(CONFIG, attention="bidirectional")
PROMPT = [1, 2, 3, 4, 5, 6, 7]

# | number, numbers | what went wrong | tests, or a reason |
_ROW = re.compile(r"^\| ([A-H]\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(\w+)::(\w+)`")


def table_rows() -> list[tuple[str, str, str]]:
    return _ROW.findall((HERE / "README.md").read_text(encoding="utf-8"))


def test_every_test_of_the_table_exists():
    rows = table_rows()
    numbers = [number for number, _, _ in rows]
    assert len(rows) > 70 and len(set(numbers)) == len(rows)
    for number, _, held_by in rows:
        tests = _TEST.findall(held_by)
        assert tests or held_by.startswith("none: "), number
        for file, name in tests:
            text = (HERE / f"{file}.py").read_text(encoding="utf-8")
            assert f"def {name}(" in text, f"{number}: {file}.py has no {name}"


def test_every_test_here_is_in_the_table():
    listed = {name for _, _, held_by in table_rows() for _, name in _TEST.findall(held_by)}
    here = re.findall(r"^def (test_[a-h]\d+_\w+)\(", Path(__file__).read_text(), re.M)
    assert here and set(here) <= listed


@pytest.fixture(scope="module")
def scripted() -> ScriptedModel:
    """Block-causal, its table to be exchanged."""
    return ScriptedModel(random_table(3))


@pytest.fixture(scope="module")
def bidirectional() -> ScriptedModel:
    return ScriptedModel(random_table(3), BIDIRECTIONAL)


def run(model, table, decoder, **given):
    model.params = jnp.asarray(table, jnp.float32)
    given = {"max_new_tokens": 16, "stop_ids": (), **given}
    [out] = generate(model, [PROMPT], decoder, **given)
    assert MASK not in out.tokens and len(out.tokens) == given["max_new_tokens"]
    return out


def certain_table() -> np.ndarray:
    """Every token follows with a probability that rounds to 1."""
    table = random_table(3)
    table[:, 5] = 200.0
    return table


@pytest.mark.parametrize("decoder", ["block", "edit"])
def test_a4_one_slot_is_forced_and_no_more(scripted, decoder):
    """Where nothing is sure, a step writes its one best slot: no two share a forward."""
    editing = {"editing_threshold": 1.0} if decoder == "edit" else {}
    out = run(scripted, random_table(4), decoder, threshold=2.0, **editing)
    assert len(set(out.unmask_forward)) == len(out.tokens)


def test_a7_steps_that_run_out(scripted):
    """Rows go on after the planned steps, and a step more or less changes no promise."""
    for steps in (1, 2, 3):
        given = {"denoising_steps": steps, "remasking_strategy": "low_confidence_static"}
        out = run(scripted, random_table(5), "block", **given)
        assert out.stats.forwards["denoise"] <= 5 * steps  # blocks of 4, the first partial


def test_a11_more_steps_than_masks_run_no_forward(scripted):
    outs = [
        run(scripted, random_table(6), "block", threshold=2.0, denoising_steps=steps)
        for steps in (4, 9)
    ]
    assert outs[0].tokens == outs[1].tokens
    assert outs[0].stats.forwards == outs[1].stats.forwards


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a12_a_block_that_its_first_forward_decides_needs_no_other(bidirectional, cache):
    given = {"cache": cache, "block_length": 4}
    out = run(bidirectional, certain_table(), "fast_dllm", **given)
    assert out.stats.forwards["total"] == 4


@pytest.mark.parametrize("cap", [0, 3])
def test_a16_edits_end_and_leave_the_prompt(scripted, cap):
    """Every change is taken, and each brings on the next: the cap ends every block."""
    given = {"editing_threshold": 0.0, "max_post_steps": cap, "threshold": 2.0}
    blocks, masks = 5, 17  # of a prompt of 7 in blocks of 4
    for seed in range(4):
        out = run(scripted, random_table(seed), "edit", trace=True, **given)
        assert out.stats.forwards["denoise"] == masks + blocks * cap
        assert scripted.state.canvas[0, : len(PROMPT)].tolist() == PROMPT
        if cap:
            assert any(record["rule"] == "edited" for record in out.trace)


def proposal_of(confidence) -> Proposal:
    confidence = jnp.asarray([confidence], jnp.float32)
    return Proposal(
        token=jnp.zeros(confidence.shape, jnp.int32),
        confidence=confidence,
        entropy=1 - confidence,
    )


def test_d4_each_family_has_its_own_side_of_the_threshold():
    """SDAR and LLaDA2 unmask above it, Fast-dLLM from it on; it shows at exactly 1."""
    proposal, masked = proposal_of([1.0, 1.0, 0.5]), jnp.ones((1, 3), bool)
    one = jnp.ones(1, jnp.int32)
    strict = resolve_settings(DECODERS["block"], CONFIG, {"threshold": 1.0})
    assert fill_quota(strict, proposal, masked, one).tolist() == [[True, False, False]]
    loose = resolve_settings(DECODERS["fast_dllm"], BIDIRECTIONAL, {"threshold": 1.0})
    window = Window(jnp.arange(3)[None], masked, masked, 3 * one, 3 * one)
    chosen = choose(loose, proposal, window, 0 * one, one)
    assert chosen.tolist() == [[True, True, False]]


def dots(jaxpr) -> list:
    """Every matrix product of a program, also inside its loops and branches."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            found.append(equation)
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(value, core.ClosedJaxpr):
                value = value.jaxpr
            if isinstance(value, core.Jaxpr):
                found += dots(value)
    return found


def test_d10_the_precision_that_is_asked_for_reaches_every_product():
    """A TPU multiplies float32 in bfloat16 unless told otherwise."""
    model = tiny_model()
    tokens = jnp.ones((1, 8), jnp.int32)
    fields = layouts.block_causal(jnp.arange(8, dtype=jnp.int32)[None], 4)

    def forward(params):
        fns = model.fns(params)
        return fns.logits(fns.forward(tokens, fields, None).hidden)

    with jax.default_matmul_precision("highest"):
        found = dots(jax.make_jaxpr(forward)(model.params).jaxpr)
    assert len(found) >= 10  # q, k, v, scores, values, o, gate, up, down, head
    for equation in found:
        precision = equation.params["precision"]
        assert precision is not None, equation
        assert set(np.ravel(precision)) == {jax.lax.Precision.HIGHEST}, equation


V2 = dataclasses.replace(CONFIG, logit_alignment="shifted")


@pytest.mark.parametrize(
    ("decoder", "config", "given", "word"),
    [
        ("ar", CONFIG, {}, "exact"),
        ("block", CONFIG, {}, "exact"),
        ("edit", CONFIG, {}, "exact"),
        ("fast_dllm_v2", V2, {}, "exact"),
        ("fast_dllm_v2", V2, {"use_block_cache": True}, "approximate"),
        ("masked", BIDIRECTIONAL, {}, "none (exact)"),
        ("klass", BIDIRECTIONAL, {}, "none (exact)"),
        ("wino", BIDIRECTIONAL, {}, "none (exact)"),
        ("fast_dllm", BIDIRECTIONAL, {"cache": "none"}, "none (exact)"),
        ("fast_dllm", BIDIRECTIONAL, {"cache": "prefix"}, "approximate"),
        ("fast_dllm", BIDIRECTIONAL, {"cache": "dual"}, "approximate"),
        ("credit", BIDIRECTIONAL, {}, "none (exact)"),
        ("credit", BIDIRECTIONAL, {"cache": "dual"}, "approximate"),
        ("leap", BIDIRECTIONAL, {"cache": "prefix"}, "approximate"),
        ("leap", CONFIG, {}, "exact"),
    ],
)
def test_e2_every_cache_says_what_it_is(decoder, config, given, word):
    settings = resolve_settings(DECODERS[decoder], config, given)
    assert DECODERS[decoder].cache(settings).startswith(word)


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """A tokenizer that puts a BOS before a text, and whose template writes one too."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    from dllm_jax.tokenizer import Tokenizer

    vocabulary = {"<s>": BOS, "<mask>": MASK, "hi": 1, "user": 2, "?": 0}
    words = Words(WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    template = "{{ bos_token }} {% for m in messages %}user {{ m.content }}{% endfor %}"
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", mask_token="<mask>", unk_token="?"
    )
    made.chat_template = template
    directory = tmp_path_factory.mktemp("words")
    made.save_pretrained(directory)
    return Tokenizer(directory, MASK)


def test_f5_one_bos_and_not_two(word_tokenizer):
    """The rendered template brings its own; a raw prompt gets the tokenizer's."""
    assert word_tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [BOS, 2, 1]
    assert word_tokenizer.encode("hi") == [BOS, 1]


def test_f6_the_template_is_the_default_where_there_is_one(word_tokenizer):
    """--chat and --raw say it explicitly."""
    from dllm_jax.prompts import encode_prompt

    by_choice = {
        chat: encode_prompt(CONFIG, word_tokenizer, "hi", chat, 8).ids
        for chat in (None, True, False)
    }
    assert by_choice[None] == by_choice[True] == [BOS, 2, 1]
    assert by_choice[False] == [BOS, 1]


def test_f11_text_files_are_opened_as_utf8():
    """Whatever the locale: no text file is opened in the platform's default encoding."""
    for folder in ("dllm_jax", "convert", "kernels_pallas", "benchmarks", "docs"):
        for path in (HERE.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                called = getattr(node.func, "attr", getattr(node.func, "id", None))
                keywords = {keyword.arg for keyword in node.keywords}
                where = f"{path.name}:{node.lineno}"
                if called in ("read_text", "write_text"):
                    assert "encoding" in keywords, where
                if called == "open":
                    texts = {getattr(x, "value", None) for x in node.args}
                    binary = any(isinstance(t, str) and "b" in t for t in texts)
                    of_os = getattr(getattr(node.func, "value", None), "id", "") == "os"
                    assert binary or of_os or "encoding" in keywords, where


def test_h6_confidences_do_not_depend_on_the_batch(scripted):
    """A token's confidence is that of the forward that unmasked it, with company or not."""
    scripted.params = jnp.asarray(random_table(7), jnp.float32)
    prompts = [PROMPT, PROMPT[:3], [9] * 11]
    assert max(map(max, prompts)) < VOCAB
    together = generate(scripted, prompts, "block", max_new_tokens=16)
    alone = generate(scripted, prompts, "block", max_new_tokens=16, batch_size=1)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.confidence == other.confidence
        assert all(0.0 < p <= 1.0 for p in one.confidence)
