"""Log-likelihoods against published values, token-by-token loops and enumerated masks."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import BOS, CONFIG, MASK, VOCAB, tiny_model

from dllm_jax import generate, layouts, load, transformer
from dllm_jax.likelihood import (
    Likelihood,
    log_likelihood,
    make_row,
    mask_counts,
    score_rows,
    token_log_probs,
)
from dllm_jax.training.problems import generate_problems

_BLOCK_CAUSAL = ("sdar", "sdar_moe", "fast_dllm_v2", "llada2")
_WITHOUT_MASK_ID = ("fast_dllm_v2", "llada2")
_ROWS, _SLOTS = 32, 24  # of the oracle's forward, so that it is compiled once a model
_WORDS = range(1, 59)  # of the tiny models, without special ids


@pytest.fixture(scope="module")
def models(golden_dir):
    def load_model(family):
        mask_id = 253 if family in _WITHOUT_MASK_ID else None
        return load(str(golden_dir / family), dtype="float32", mask_id=mask_id)

    return functools.cache(load_model)


@pytest.fixture(scope="module")
def tiny():
    """Tiny random models by attention and alignment."""

    @functools.cache
    def build(attention, alignment):
        config = dataclasses.replace(
            CONFIG, attention=attention, logit_alignment=alignment, block_length=4
        )
        return tiny_model(3, config)

    return build


@pytest.fixture(scope="module")
def golden(golden_dir):
    def read(family):
        cases = json.loads((golden_dir / family / "cases.json").read_text())
        return cases["loglikelihood"], load_file(golden_dir / family / "arrays.safetensors")

    return functools.cache(read)


# --- published values -----------------------------------------------------------------


def _with_stored_masks(model, case, perturbed, p_mask):
    """The published estimate, from the rows and mask ratios that it drew."""
    ids = case["prompt_ids"] + case["answer_ids"]
    masked = perturbed == model.config.mask_id
    np.testing.assert_array_equal(
        perturbed[~masked], np.array([ids] * len(masked))[~masked]
    )
    rows = [
        make_row(model.config, ids, row, row / p, prompt_length=len(case["prompt_ids"]))
        for row, p in zip(masked, p_mask, strict=True)
    ]
    sums = score_rows(model, rows, batch_size=4, cfg_scale=case.get("cfg_scale", 0.0))
    return np.mean([total.sum() for total in sums])


@pytest.mark.parametrize("index", range(4))
def test_published_llada(models, golden, index):
    cases, arrays = golden("llada")
    perturbed = arrays[f"ll.{index}.perturbed_ids"]
    got = _with_stored_masks(
        models("llada"),
        cases[index],
        perturbed.reshape(-1, perturbed.shape[-1]),
        arrays[f"ll.{index}.p_mask"].reshape(-1),
    )
    np.testing.assert_allclose(got, cases[index]["log_likelihood"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("index", range(3))
def test_published_dream(models, golden, index):
    cases, arrays = golden("dream")
    assert cases[index]["kind"] == "mc"
    got = _with_stored_masks(
        models("dream"),
        cases[index],
        arrays[f"ll.{index}.model_input_ids"],
        arrays[f"ll.{index}.p_mask"],
    )
    np.testing.assert_allclose(got, cases[index]["log_likelihood"], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "order"), [("ar_ftb", "left_to_right"), ("ar_btf", "right_to_left")]
)
def test_published_orders_of_dream(models, golden, kind, order):
    [case] = [case for case in golden("dream")[0] if case["kind"] == kind]
    [out] = log_likelihood(
        models("dream"),
        [case["prompt_ids"]],
        [case["answer_ids"]],
        order=order,
        batch_size=4,
    )
    np.testing.assert_allclose(
        out.log_likelihood, case["log_likelihood"], atol=1e-3, rtol=0
    )
    length = len(case["answer_ids"])
    assert out == Likelihood(out.log_likelihood, "exact", None, length, 1, length)


@pytest.mark.parametrize("index", [0, 4])
def test_published_greedy_match(models, golden, index):
    """The other half of published multiple choice needs no function of its own."""
    case = golden("llada")[0][index]
    [out] = generate(
        models("llada"),
        [case["prompt_ids"]],
        "masked",
        block_length=0,
        max_new_tokens=len(case["answer_ids"]),
        cfg_scale=case["cfg_scale"],
        stop_ids=(),
    )
    assert (out.tokens == case["answer_ids"]) == case["is_greedy"]


# --- an oracle of single forwards, without the paired layout ---------------------------


@functools.partial(jax.jit, static_argnames=("config", "block_length"))
def _log_probs(params, config, tokens, length, block_length):
    position = jnp.broadcast_to(jnp.arange(_SLOTS, dtype=jnp.int32), tokens.shape)
    valid = position < length[:, None]
    if block_length is None:
        fields = layouts.bidirectional(position, valid)
    else:
        fields = layouts.block_causal(position, block_length, valid)
    hidden = transformer.forward(params, config, tokens, fields).hidden
    return jax.nn.log_softmax(transformer.logits(params, hidden))


def _oracle(model, rows, block_length):
    """Log-probabilities float `[row, slot, vocabulary]` of rows of tokens."""
    assert len(rows) <= _ROWS
    tokens, length = np.zeros((_ROWS, _SLOTS), np.int32), np.zeros(_ROWS, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], length[index] = row, len(row)
    out = _log_probs(model.params, model.config, tokens, length, block_length)
    return np.asarray(out, np.float64)


def _text(seed, length, words=_WORDS):
    rng = np.random.default_rng(seed)
    return rng.choice(np.array(words), length).tolist()


@pytest.mark.parametrize("family", _BLOCK_CAUSAL)
def test_blocks_of_one_are_the_chain_rule(models, family):
    """One forward gives what one forward a token gives."""
    model = models(family)
    shifted = model.config.logit_alignment == "shifted"
    ids, start = _text(1, 17, range(1, 240)), 5
    mask_id = model.config.mask_id
    rows = [ids[:p] if shifted else [*ids[:p], mask_id] for p in range(start, len(ids))]
    table = _oracle(model, rows, 1)
    want = sum(table[i, len(row) - 1, ids[start + i]] for i, row in enumerate(rows))
    [out] = log_likelihood(
        model, [ids[:start]], [ids[start:]], block_length=1, batch_size=2
    )
    np.testing.assert_allclose(out.log_likelihood, want, atol=1e-4, rtol=0)
    assert out == Likelihood(out.log_likelihood, "exact", None, 12, 1, 1)


class _Block:
    """Log-probabilities of a block's tokens under every choice of masks in it."""

    def __init__(self, model, ids, start, end, block_length):
        """`start` to `end` are the target's tokens in one block."""
        config = model.config
        shifted = config.logit_alignment == "shifted"
        begin, stop = 0, len(ids)
        if block_length is not None:
            begin = start // block_length * block_length
            stop = begin + block_length
        self.known = 0.0
        if shifted and start == begin:
            before = _oracle(model, [ids[:begin]], block_length)
            self.known = before[0, begin - 1, ids[begin]]
            start += 1
        self.slots = range(start, end)
        self.subsets = [
            chosen
            for size in range(1, len(self.slots) + 1)
            for chosen in itertools.combinations(self.slots, size)
        ]
        open_block = [*ids[begin:stop], *[config.mask_id] * (stop - len(ids))][
            : stop - begin
        ]
        rows = [
            [
                *ids[:begin],
                *(
                    config.mask_id if begin + i in chosen else token
                    for i, token in enumerate(open_block)
                ),
            ]
            for chosen in self.subsets
        ]
        table = _oracle(model, rows, block_length)
        self.log_prob = {
            (chosen, slot): table[row, slot - shifted, ids[slot]]
            for row, chosen in enumerate(self.subsets)
            for slot in chosen
        }

    def weight(self, chosen):
        """What an enumerated choice counts: its probability times L / k."""
        return 1.0 / (len(chosen) * math.comb(len(self.slots), len(chosen)))

    def bound(self):
        """The expectation over a uniform number of masks at uniform slots."""
        return self.known + sum(
            self.weight(chosen) * log_prob
            for (chosen, _), log_prob in self.log_prob.items()
        )

    def chains(self):
        """Log-probabilities of the block by the chain rule, one for each order."""
        return [
            self.known
            + sum(
                self.log_prob[tuple(sorted(order[i:])), slot]
                for i, slot in enumerate(order)
            )
            for order in itertools.permutations(self.slots)
        ]


_CASES = [  # attention, alignment, prompt, target, ends of the target's parts by block
    ("block_causal", "same", 6, 7, (8, 12, 13)),
    ("block_causal", "shifted", 6, 7, (8, 12, 13)),
    ("block_causal", "shifted", 8, 7, (12, 15)),
    ("bidirectional", "same", 6, 4, (10,)),
    ("bidirectional", "shifted", 6, 4, (10,)),
]
_IDS = ["same", "shifted", "shifted-whole-blocks", "bidirectional", "bidirectional-shifted"]


def _blocks(model, ids, start, ends):
    block_length = 4 if model.config.attention == "block_causal" else None
    starts = (start, *ends[:-1])
    return block_length, [
        _Block(model, ids, *part, block_length) for part in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("attention", "alignment", "start", "new", "ends"), _CASES, ids=_IDS
)
def test_bound_is_what_all_masks_give(tiny, attention, alignment, start, new, ends):
    model = tiny(attention, alignment)
    ids = _text(start, start + new)
    block_length, blocks = _blocks(model, ids, start, ends)
    want = sum(block.bound() for block in blocks)

    # Every choice of masks, weighed by its chance: the expectation exactly. The blocks do
    # not see each other's noise, so that a row may hold one choice of each.
    rows = []
    for number in range(max(len(block.subsets) for block in blocks)):
        masked, weight = np.zeros(len(ids), bool), np.zeros(len(ids))
        for block, part in zip(blocks, (start, *ends), strict=False):
            if number < len(block.subsets):
                chosen = list(block.subsets[number])
                masked[chosen], weight[chosen] = True, block.weight(chosen)
            if number == 0 and block.known:
                weight[part] = 1.0
        rows.append(
            make_row(
                model.config,
                ids,
                masked,
                weight,
                prompt_length=start,
                block_length=block_length,
            )
        )
    got = sum(total.sum() for total in score_rows(model, rows))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)

    # The bound is the mean over all orders, and so at most the logarithm of their mean.
    for block in blocks:
        chains = block.chains()
        np.testing.assert_allclose(block.bound(), np.mean(chains), atol=1e-6, rtol=0)
        exact = np.logaddexp.reduce(chains) - math.log(len(chains))
        assert block.bound() <= exact + 1e-9

    # Independent estimates scatter about it, as far as their errors say.
    repeats = 24
    outs = log_likelihood(
        model, [ids[:start]] * repeats, [ids[start:]] * repeats, num_samples=12, seed=7
    )
    values = np.array([out.log_likelihood for out in outs])
    errors = np.array([out.standard_error for out in outs])
    assert abs(values.mean() - want) < 4 * values.std(ddof=1) / math.sqrt(repeats)
    assert 0.5 < values.std(ddof=1) / np.sqrt(np.mean(errors**2)) < 1.6
    assert {(o.kind, o.num_tokens, o.num_samples, o.forwards) for o in outs} == {
        ("bound", new, 12, 12)
    }


def test_orders_of_a_bidirectional_model(tiny):
    """Both are chain rules over the same table of all masks."""
    model, start, ids = tiny("bidirectional", "same"), 6, _text(6, 10)
    block = _Block(model, ids, start, len(ids), None)
    chains = dict(zip(itertools.permutations(block.slots), block.chains(), strict=True))
    for order, slots in (
        ("left_to_right", [*block.slots]),
        ("right_to_left", [9, 8, 7, 6]),
    ):
        [out] = log_likelihood(model, [ids[:start]], [ids[start:]], order=order)
        np.testing.assert_allclose(
            out.log_likelihood, chains[tuple(slots)], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("attention", "alignment", "start"),
    [
        ("bidirectional", "same", 5),
        ("bidirectional", "shifted", 5),
        ("block_causal", "same", 7),
        ("block_causal", "shifted", 8),
    ],
)
def test_single_token_is_exact(tiny, attention, alignment, start):
    """Nothing is to be drawn, whatever num_samples says."""
    model, ids = tiny(attention, alignment), _text(2, start + 1)
    block_length, [block] = _blocks(model, ids, start, (start + 1,))
    [out] = log_likelihood(
        model, [ids[:start]], [ids[start:]], block_length=block_length, num_samples=50
    )
    want = block.bound()
    np.testing.assert_allclose(out.log_likelihood, want, atol=1e-4, rtol=0)
    assert out == Likelihood(out.log_likelihood, "exact", None, 1, 1, 1)


def test_guidance_hides_the_prompt(tiny):
    """Twice the logits with the prompt, less those without; log-probabilities do too."""
    model, start, ids = tiny("bidirectional", "same"), 6, _text(4, 10)
    rows = [[*ids[:start], *[MASK] * 4], [MASK] * 10]
    with_prompt, without = _oracle(model, rows, None)[:2, start]
    want = jax.nn.log_softmax(2.0 * with_prompt - without)[ids[start]]
    masked, weight = np.arange(10) >= start, np.arange(10) == start
    row = make_row(model.config, ids, masked, weight, prompt_length=start)
    [got] = score_rows(model, [row], cfg_scale=1.0)
    np.testing.assert_allclose(got, [want], atol=1e-4, rtol=0)


# --- draws ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "num_samples"), [(10, 4), (3, 8), (7, 7), (1, 5), (6, 1)]
)
def test_counts_are_uniform_and_spread(length, num_samples):
    drawn = [mask_counts(start, length, num_samples) for start in range(length)]
    values, times = np.unique(np.concatenate(drawn), return_counts=True)
    assert values.tolist() == list(range(1, length + 1))
    assert set(times) == {num_samples}  # over all starts, each count as often as another
    for counts in drawn:
        assert (np.diff(counts) >= 0).all()
        times = np.bincount(counts, minlength=length + 1)[1:]
        assert times.max() - times.min() <= 1


def _value(out):
    return out.log_likelihood


def test_seeds(tiny):
    model, ids = tiny("bidirectional", "same"), _text(5, 14)
    prompts, targets = [ids[:5]] * 3, [ids[5:]] * 3
    score = functools.partial(log_likelihood, model, num_samples=4)
    outs = score(prompts, targets, seed=3)
    assert outs == score(prompts, targets, seed=3)
    assert len({*map(_value, outs)}) == 3  # of one seed, each prompt has its own draws
    assert len({*map(_value, outs), *map(_value, score(prompts, targets, seed=4))}) == 6
    a, b, c = score(prompts, targets, seed=[9, 3, 9])
    assert a == c != b
    np.testing.assert_allclose(_value(b), _value(outs[0]), atol=1e-4)
    [alone] = score(prompts[:1], targets[:1], num_samples=1)
    assert (alone.standard_error, alone.num_samples, alone.kind) == (None, 1, "bound")


@pytest.mark.parametrize("attention", ["block_causal", "bidirectional"])
def test_a_prompt_does_not_depend_on_its_batch(tiny, attention):
    """Alone, between others, in batches of another size; and few programs are compiled."""
    model = tiny(attention, "same")
    sizes = [(5, 6), (70, 9), (9, 3), (66, 8), (4, 11)]
    texts = [_text(index, sum(size)) for index, size in enumerate(sizes)]
    prompts = [text[:size] for text, (size, _) in zip(texts, sizes, strict=True)]
    targets = [text[size:] for text, (size, _) in zip(texts, sizes, strict=True)]
    score = functools.partial(log_likelihood, model, num_samples=3)
    seeds = [11, 12, 13, 14, 15]
    traces = model.num_traces
    outs = score(prompts, targets, seed=seeds)
    assert model.num_traces - traces <= 2
    traces = model.num_traces
    for index in (1, 2):
        part = slice(index, index + 1)
        [alone] = score(prompts[part], targets[part], seed=seeds[part])
        np.testing.assert_allclose(_value(alone), _value(outs[index]), atol=1e-5)
    assert model.num_traces == traces
    others = score(prompts[2:3], targets[2:3], seed=seeds[2:3], batch_size=2)
    np.testing.assert_allclose(_value(others[0]), _value(outs[2]), atol=1e-4)


def test_nothing_to_score(tiny):
    assert log_likelihood(tiny("bidirectional", "same"), [], []) == []


# --- texts ----------------------------------------------------------------------------


class _Letters:
    """A tokenizer of single letters, but for one pair that is a token."""

    has_chat_template = True

    def encode(self, text, add_special_tokens=True):
        text = text.replace("ab", "!")
        bos = [BOS] if add_special_tokens else []
        return bos + ["! abcdefgh".index(letter) + 1 for letter in text]

    def encode_chat(self, messages):
        [message] = messages
        return self.encode("h" + message["content"] + "h", add_special_tokens=False)


_A, _AB, _SPACE = 3, 1, 2


@pytest.mark.parametrize(
    ("prompt", "target", "chat", "ids"),
    [
        ("cd", "ef", False, ([BOS, 5, 6], [7, 8])),
        ("cd ", "ef", False, ([BOS, 5, 6], [_SPACE, 7, 8])),
        ("cda", "bef", False, ([BOS, 5, 6], [_AB, 7, 8])),  # `ab` is one token
        ("cda", "ef", False, ([BOS, 5, 6, _A], [7, 8])),
        ("", "ef", False, ([BOS], [7, 8])),
        ("cd", "ef", True, ([10, 5, 6, 10], [7, 8])),
        ("cda", [4], False, ([BOS, 5, 6, _A], [4])),
        ([5], "ab", False, ([5], [_AB])),
        ([], [_AB], False, ([BOS], [_AB])),
    ],
)
def test_texts_become_ids(tiny, monkeypatch, prompt, target, chat, ids):
    model = tiny("block_causal", "same")
    monkeypatch.setattr(model, "tokenizer", _Letters())
    score = functools.partial(log_likelihood, model, block_length=1)
    [got] = score([prompt], [target], chat=chat)
    [want] = score([ids[0]], [ids[1]])
    assert got == want


def test_the_demo_model_prefers_right_answers():
    """As a multiple choice between a worked solution and the same with a wrong sum."""
    model = load("demo", dtype="float32")
    problems = itertools.islice(generate_problems("test", 5), 8)
    questions, right, wrong = [], [], []
    for problem in problems:
        steps, _ = problem.solution.rsplit("####", 1)
        questions.append(problem.question)
        right.append(f"{steps}#### {problem.answer}")
        wrong.append(f"{steps}#### {problem.answer + 1}")
    score = functools.partial(log_likelihood, model, block_length=1, chat=True)
    pairs = zip(score(questions, right), score(questions, wrong), strict=True)
    assert all(a.log_likelihood > b.log_likelihood + 2.0 for a, b in pairs)


# --- wrong input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_samples": 0}, "num_samples=0 must be a whole number of at least 1"),
        ({"num_samples": 2.0}, "num_samples=2.0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True must be"),
        (
            {"block_length": 0},
            "block_length=0 must be a whole number from 1 to the model's",
        ),
        (
            {"block_length": 257},
            "block_length=257 must be a whole number from 1 to the mod",
        ),
        ({"cfg_scale": 0.5}, "cfg_scale=0.5 must be 0 for a block-causal model"),
        ({"cfg_scale": -1.0}, "cfg_scale=-1.0 must be a number of at least 0"),
        ({"cfg_scale": math.nan}, "cfg_scale=nan must be a number of at least 0"),
        (
            {"order": "left_to_right"},
            "order='left_to_right' must be 'random' for a block-ca",
        ),
        (
            {"order": "best"},
            "order='best' must be one of random, left_to_right, right_to_left",
        ),
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\*\*32\)"),
        ({"seed": [1, 2]}, "2 seeds were given for 1 prompts"),
        ({"targets": [[]]}, "the target is empty"),
        ({"targets": []}, "1 prompts were given for 0 targets"),
        ({"targets": [[1], [2]]}, "1 prompts were given for 2 targets"),
        ({"targets": [[1, MASK]]}, f"token id {MASK} is the mask token: a target"),
        ({"prompts": [[MASK]]}, f"token id {MASK} is the mask token: a prompt"),
        (
            {"targets": [[VOCAB]]},
            f"token id {VOCAB} of the target is outside the vocabulary",
        ),
        (
            {"prompts": [[-1]]},
            f"token id -1 of the prompt is outside the vocabulary of {VOCAB}",
        ),
        ({"targets": [[1] * 254]}, "3 tokens and a target of 254 exceed the model's 256"),
        ({"targets": ["b"]}, "the model has no tokenizer: give token ids"),
        ({"prompts": "ab"}, "prompts='ab' must be a list"),
        ({"targets": 5}, "targets=5 must be a list"),
        ({"prompts": [1]}, "prompt 1 must be a text or a list of token ids"),
        ({"targets": [[1.5]]}, r"target \[1.5\] must be a text or a list"),
        ({"targets": [[True]]}, r"target \[True\] must be a text or a list"),
        (
            {"prompts": [[1], [1]], "targets": [[2], []]},
            "prompt 1: the target is empty",
        ),
    ],
)
def test_wrong_input_is_named(tiny, arguments, words):
    given = {"prompts": [[1, 2, 3]], "targets": [[4, 5]], **arguments}
    with pytest.raises(ValueError, match=words) as caught:
        log_likelihood(tiny("block_causal", "same"), **given)
    assert "\n" not in str(caught.value)


def test_wrong_input_of_other_models(tiny, monkeypatch):
    model = tiny("bidirectional", "same")
    with pytest.raises(ValueError, match="block_length=4 must be None for a bidirectional"):
        log_likelihood(model, [[1]], [[2]], block_length=4)
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, bos_id=None))
    with pytest.raises(ValueError, match="the prompt is empty and the model has no BOS"):
        log_likelihood(model, [[]], [[2]])
    letters = _Letters()
    letters.has_chat_template = False
    monkeypatch.setattr(model, "tokenizer", letters)
    with pytest.raises(ValueError, match="chat=True, but the model has no chat template"):
        log_likelihood(model, ["a"], ["b"], chat=True)


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_log_probs_of_tokens(golden_dir, family):
    """Against whole forwards: after what precedes (block-causal), among all the others."""
    model = load(str(golden_dir / family), dtype="float32")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 200, n).tolist() for n in (5, 17)]
    targets = [rng.integers(0, 200, n).tolist() for n in (6, 4)]
    got = token_log_probs(model, prompts, targets, batch_size=3)
    assert [len(row) for row in got] == [6, 4]
    if family == "sdar":
        whole = log_likelihood(model, prompts, targets, block_length=1)
        for row, one in zip(got, whole, strict=True):
            np.testing.assert_allclose(sum(row), one.log_likelihood, atol=1e-4)
        return
    fns = model.fns(model.params)
    for prompt, target, row in zip(prompts, targets, got, strict=True):
        for index, token in enumerate(target):
            ids = np.array([prompt + target], np.int32)
            slot = len(prompt) + index
            ids[0, slot] = model.config.mask_id
            position = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
            hidden = fns.forward(ids, layouts.bidirectional(position), None).hidden
            read = slot - 1 if family == "dream" else slot
            logits = np.asarray(fns.logits(hidden[:, read]))[0].astype(np.float64)
            want = (
                logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            )
            np.testing.assert_allclose(row[index], want, atol=1e-4)
