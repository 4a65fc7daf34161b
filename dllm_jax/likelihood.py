"""Log-likelihoods of given targets: exact where the model has an order, else a bound.

Every family is scored over rows [clean | noisy] under `layouts.training_pairs`: what is
noised is predicted from its own block and from the clean text of earlier blocks. A
bidirectional model has a single block, the whole row, and so no clean half. A block of one
token makes that the chain rule, in one forward.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from dllm_jax import layouts
from dllm_jax.config import ModelConfig
from dllm_jax.model import Model, check_loaded
from dllm_jax.prompts import Prompt, bucket, no_masks, token_ids
from dllm_jax.sharding import place
from dllm_jax.tokenizer import Tokenizer

Order = Literal["random", "left_to_right", "right_to_left"]
ORDERS: tuple[Order, ...] = ("random", "left_to_right", "right_to_left")

_CHUNK = 64
"""Slots of a row whose logits exist at once; all buckets are multiples of it."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """How probable one target is after its prompt."""

    log_likelihood: float  # nats, summed over the target's tokens
    kind: Literal["exact", "bound"]  # bound: estimates what is at most the log-probability
    standard_error: float | None  # of the estimate; None if exact or of one sample only
    num_tokens: int  # of the target
    num_samples: int  # draws of masks; 1 if exact
    forwards: int  # rows that went through the model; guidance does not count twice


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredRow:
    """What one forward scores: n targets of a row [clean | noisy] of T + U slots."""

    clean: np.ndarray  # int [T], text that noisy slots of later blocks see; from position 0
    noisy: np.ndarray  # int [U], tokens and masks that are denoised; from `begin` on
    begin: int  # position of the first noisy slot, the beginning of a block
    block_length: int
    prompt_length: int  # leading tokens that guidance hides
    read: np.ndarray  # int [n], slots whose logits predict the targets
    target: np.ndarray  # int [n]
    weight: np.ndarray  # float [n], of each target's log-probability
    block: np.ndarray  # int [n], its block, counted from `begin`


def make_row(
    config: ModelConfig,
    ids: Sequence[int],
    masked: np.ndarray,
    weight: np.ndarray,
    *,
    prompt_length: int = 0,
    block_length: int | None = None,
) -> ScoredRow:
    """The row in which given slots of a text are masked and given tokens are scored.

    Logits in place predict a masked slot where it stands. Shifted logits predict it one
    slot earlier, as at decoding time: within the block from the noisy slot before, whatever
    that holds, but a block's first token from the clean text before the block, which is how
    Fast-dLLM v2 has it before it denoises the rest (specs, Fast-dLLM v2 section 3).

    Slots of the last block that lie behind the text are masks, as at decoding time.

    Args:
      config: the model.
      ids: the text, prompt and target, n tokens.
      masked: bool `[n]`, slots that hold masks.
      weight: float `[n]`, what each token's log-probability counts; 0 is not scored.
      prompt_length: tokens before the target; whole blocks of them are in the clean half
        only, and guidance hides them.
      block_length: None for a bidirectional model, whose only block is the row.
    """
    ids = np.asarray(ids, np.int32)
    block_length = block_length or len(ids)
    begin = prompt_length // block_length * block_length
    last = (len(ids) - 1) // block_length * block_length
    noisy = np.full(last + block_length - begin, config.mask_id, np.int32)
    noisy[: len(ids) - begin] = np.where(masked, config.mask_id, ids)[begin:]
    [scored] = np.nonzero(weight)
    read = last + scored - begin
    if config.logit_alignment == "shifted":
        first = (scored % block_length == 0) & (scored > 0)
        read = np.maximum(np.where(first, scored, read), 1) - 1
        if len(first) and first.all():  # all are read from the clean half
            noisy = noisy[:0]
    return ScoredRow(
        clean=ids[:last],
        noisy=noisy,
        begin=begin,
        block_length=block_length,
        prompt_length=prompt_length,
        read=read,
        target=ids[scored],
        weight=np.asarray(weight, np.float64)[scored],
        block=(scored - begin) // block_length,
    )


class _Batch(NamedTuple):
    """Rows as one program takes them; all int32."""

    clean: Any  # [B, T]
    clean_length: Any  # [B]
    noisy: Any  # [B, U]
    noisy_length: Any  # [B]
    begin: Any  # [B]
    block_length: Any  # [B]
    read: Any  # [B, W]
    target: Any  # [B, W]


def _row_shape(row: ScoredRow) -> tuple[int, int, int]:
    """The bucketed T, U and W that a row is padded to; a half that is empty stays so."""
    clean, noisy = (
        bucket(len(half)) if len(half) else 0 for half in (row.clean, row.noisy)
    )
    return clean, noisy, bucket(len(row.target))


def _stack(rows: Sequence[ScoredRow], size: int) -> _Batch:
    """Rows of one shape, filled up to `size` rows by rows without a token."""
    clean, noisy, scored = _row_shape(rows[0])
    batch = _Batch(
        clean=np.zeros((size, clean), np.int32),
        clean_length=np.zeros(size, np.int32),
        noisy=np.zeros((size, noisy), np.int32),
        noisy_length=np.zeros(size, np.int32),
        begin=np.zeros(size, np.int32),
        block_length=np.ones(size, np.int32),
        read=np.zeros((size, scored), np.int32),
        target=np.zeros((size, scored), np.int32),
    )
    for index, row in enumerate(rows):
        batch.clean[index, : len(row.clean)] = row.clean
        batch.clean_length[index] = len(row.clean)
        batch.noisy[index, : len(row.noisy)] = row.noisy
        batch.noisy_length[index] = len(row.noisy)
        batch.begin[index] = row.begin
        batch.block_length[index] = row.block_length
        # A clean half that is padded moves the noisy one.
        moved = np.where(row.read < len(row.clean), 0, clean - len(row.clean))
        batch.read[index, : len(row.read)] = row.read + moved
        batch.target[index, : len(row.target)] = row.target
    return batch


def _scorer(model: Model, guided: bool):
    """The program: a batch to the float32 cross-entropies `[B, W]` of its targets.

    If guided, the second half of the batch are the first half's rows without prompts, and
    the result is of the first half.
    """

    def score(params: Any, batch: _Batch, cfg_scale: jax.Array) -> jax.Array:
        fns = model.fns(params)
        num_rows, clean_slots = batch.clean.shape
        slot = jnp.arange(batch.noisy.shape[1], dtype=jnp.int32)
        clean_position = jnp.broadcast_to(
            jnp.arange(clean_slots, dtype=jnp.int32), batch.clean.shape
        )
        fields = layouts.training_pairs(
            clean_position,
            batch.begin[:, None] + slot,
            batch.block_length,
            clean_position < batch.clean_length[:, None],
            slot < batch.noisy_length[:, None],
        )
        tokens = jnp.concatenate([batch.clean, batch.noisy], axis=1)
        hidden = fns.forward(tokens, fields, None).hidden
        hidden = jnp.take_along_axis(hidden, batch.read[..., None], axis=1)

        def cross_entropy(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            states, target = chunk  # [B, _CHUNK, D], [B, _CHUNK]
            logits = fns.logits(states)
            if guided:
                logits, without = jnp.split(logits, 2)
                logits = without + (cfg_scale + 1.0) * (logits - without)
                target = target[: num_rows // 2]
            return optax.softmax_cross_entropy_with_integer_labels(logits, target)

        def chunks(x: jax.Array) -> jax.Array:  # [B, W, ..] -> [W / _CHUNK, B, _CHUNK, ..]
            return x.reshape(num_rows, -1, _CHUNK, *x.shape[2:]).swapaxes(0, 1)

        out = jax.lax.map(cross_entropy, (chunks(hidden), chunks(batch.target)))
        return out.swapaxes(0, 1).reshape(out.shape[1], -1)

    # Rows are not divided over a mesh: guidance pairs them.
    specs = None if model.mesh is None else model.specs
    return model.jit(score, (specs, P(), P()), P())


def score_rows(
    model: Model, rows: Iterable[ScoredRow], *, batch_size: int = 8, cfg_scale: float = 0.0
) -> list[np.ndarray]:
    """Weighted log-probabilities of rows with given masks, block by block.

    Rows meet in batches of one size and of their own bucketed lengths, so that few programs
    are compiled and no row is padded for the sake of another.

    Args:
      model: from `load`.
      rows: from `make_row`; taken as needed, so they may come from a generator.
      batch_size: rows of a forward.
      cfg_scale: of guidance, (cfg_scale + 1) * logits - cfg_scale * logits without the
        prompt; 0 is off. For bidirectional models.

    Returns:
      For each row float64 `[blocks]`: the sum of `weight * log p` over a block's targets.
    """
    results: dict[int, np.ndarray] = {}
    waiting: dict[tuple[int, ...], list[tuple[int, ScoredRow]]] = {}
    guided = cfg_scale > 0.0
    key = ("likelihood", "guided" if guided else "plain")

    def run(group: list[tuple[int, ScoredRow]]) -> None:
        batch = _stack([row for _, row in group], batch_size)
        if guided:
            noisy = batch.noisy.copy()
            for index, (_, row) in enumerate(group):
                noisy[index, : row.prompt_length] = model.config.mask_id
            halves = zip(batch, batch._replace(noisy=noisy), strict=True)
            batch = _Batch(*map(np.concatenate, halves))
        args = (model.params, *place(model.mesh, (batch, np.float32(cfg_scale)), P()))
        nll = np.asarray(model.run_program(key, lambda: _scorer(model, guided), args))
        for values, (index, row) in zip(nll.astype(np.float64), group, strict=False):
            values = -values[: len(row.target)] * row.weight
            results[index] = np.bincount(row.block, values)

    for index, row in enumerate(rows):
        group = waiting.setdefault(_row_shape(row), [])
        group.append((index, row))
        if len(group) == batch_size:
            run(group)
            group.clear()
    for group in filter(None, waiting.values()):
        run(group)
    return [results[index] for index in range(len(results))]


_Masks = Iterator[tuple[np.ndarray, np.ndarray]]  # masked bool [n], weight float64 [n]


def mask_counts(start: int, length: int, num_samples: int) -> np.ndarray:
    """How many of `length` tokens each sample masks: int `[num_samples]` in 1..length.

    Counts are spread evenly over the samples from a start in [0, length), which is drawn
    (specs, LLaDA 3.1), so each is uniform. The published code rounds halves to even, and
    then prefers even counts; the floor prefers none. They ascend, so that neighbours differ
    least.
    """
    spread = np.arange(num_samples) * length // num_samples
    return np.sort((start + spread) % length) + 1


def _random_masks(
    rng: np.random.Generator, blocks: list[np.ndarray], length: int, num_samples: int
) -> _Masks:
    """Draws masks in each block by their number, and weights that undo the choice.

    A block of L tokens has k masks, k uniform in 1..L, at k slots of equal chance, each of
    weight L / k: the expectation is the bound (LLaDA, equation 6).
    """
    counts = [
        mask_counts(rng.integers(len(block)), len(block), num_samples) for block in blocks
    ]
    for sample in range(num_samples):
        weight = np.zeros(length)
        for block, count in zip(blocks, counts, strict=True):
            chosen = rng.permutation(block)[: count[sample]]
            weight[chosen] = len(block) / len(chosen)
        yield weight > 0.0, weight


def _ordered_masks(start: int, length: int, order: Order) -> _Masks:
    """The chain rule: each target token alone, with what comes after it in order masked."""
    position = np.arange(length)
    for scored in range(start, length):
        late = position >= scored if order == "left_to_right" else position <= scored
        yield late & (position >= start), (position == scored).astype(np.float64)


class _Job(NamedTuple):
    """The rows that one prompt and target need."""

    ids: list[int]
    prompt_length: int
    block_length: int | None
    masks: _Masks
    num_rows: int
    num_samples: int | None  # None: the rows give an exact value


def _random_job(
    config: ModelConfig,
    ids: list[int],
    prompt_length: int,
    block_length: int | None,
    num_samples: int,
    rng: np.random.Generator,
) -> _Job:
    position = np.arange(prompt_length, len(ids))
    number, offset = np.divmod(position, block_length or len(ids))
    # Shifted, a block's first token is known before the block is denoised.
    ahead = (offset == 0) & (config.logit_alignment == "shifted")
    blocks = [position[(number == b) & ~ahead] for b in np.unique(number[~ahead])]
    exact = all(len(block) == 1 for block in blocks)
    samples = 1 if exact else num_samples

    def masks() -> _Masks:
        for masked, weight in _random_masks(rng, blocks, len(ids), samples):
            weight[position[ahead]] = 1.0
            yield masked, weight

    kept = None if exact else samples
    return _Job(ids, prompt_length, block_length, masks(), samples, kept)


def _ordered_job(ids: list[int], prompt_length: int, order: Order) -> _Job:
    masks = _ordered_masks(prompt_length, len(ids), order)
    return _Job(ids, prompt_length, None, masks, len(ids) - prompt_length, None)


def _estimate(job: _Job, values: np.ndarray) -> Likelihood:
    """The result from weighted log-probabilities `[rows, blocks]`."""
    samples = job.num_samples
    total = values.sum() if samples is None else values.mean(axis=0).sum()
    error = None
    if samples is not None and samples > 1:
        # Successive differences: the spread at (nearly) equal counts, which is what
        # stratified counts leave. Blocks are drawn, and scored, independently.
        spread = np.square(np.diff(values, axis=0)).mean(axis=0) / 2.0
        error = math.sqrt(spread.sum() / samples)
    return Likelihood(
        log_likelihood=float(total),
        kind="exact" if samples is None else "bound",
        standard_error=error,
        num_tokens=len(job.ids) - job.prompt_length,
        num_samples=samples or 1,
        forwards=job.num_rows,
    )


def _check_settings(
    config: ModelConfig,
    num_samples: int,
    batch_size: int,
    block_length: int | None,
    cfg_scale: float,
    order: Order,
) -> None:
    """Raises ValueError for what is wrong in itself or does not fit the model."""
    for name, value in {"num_samples": num_samples, "batch_size": batch_size}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
    if order not in ORDERS:
        raise ValueError(f"{order=} must be one of {', '.join(ORDERS)}.")
    if type(cfg_scale) not in (int, float) or not 0.0 <= cfg_scale < math.inf:
        raise ValueError(f"{cfg_scale=} must be a number of at least 0.")
    bidirectional = config.attention == "bidirectional"
    if block_length is not None and bidirectional:
        raise ValueError(
            f"{block_length=} must be None for a bidirectional model: it has no blocks."
        )
    longest = config.max_positions
    if block_length is not None and (
        type(block_length) is not int or not 1 <= block_length <= longest
    ):
        raise ValueError(
            f"{block_length=} must be a whole number from 1 to the model's {longest} "
            "positions."
        )
    if cfg_scale > 0.0 and not bidirectional:
        raise ValueError(f"{cfg_scale=} must be 0 for a block-causal model.")
    if order != "random" and not bidirectional:
        raise ValueError(
            f"{order=} must be 'random' for a block-causal model; with block_length=1 it "
            "is scored exactly from left to right."
        )


def _seeds(seed: int | Sequence[int], num_prompts: int) -> list[tuple[int, int]]:
    """The entropy of each prompt's generator."""
    seeds = list(seed) if isinstance(seed, list | tuple) else [seed]
    if not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ValueError(f"{seed=} must be in [0, 2**32).")
    if not isinstance(seed, list | tuple):
        return [(seed, index) for index in range(num_prompts)]
    if len(seeds) != num_prompts:
        raise ValueError(f"{len(seeds)} seeds were given for {num_prompts} prompts.")
    return [(s, 0) for s in seeds]


def _tokenize(
    tokenizer: Tokenizer, prompt: Prompt, target: Prompt, chat: bool
) -> tuple[Any, Any]:
    """Token ids in place of texts.

    A text after a text is cut out of their joint tokens, so that both are tokenized as in
    running text (specs, LLaDA 3.1). A token that spans the border counts as the target's;
    published code leaves it out, and then scores another text.
    """
    if isinstance(prompt, str) and isinstance(target, str) and not chat:
        alone, joint = tokenizer.encode(prompt.rstrip()), tokenizer.encode(prompt + target)
        same = [a == b for a, b in zip(alone, joint, strict=False)]
        cut = [*same, False].index(False)
        return joint[:cut], joint[cut:]
    if isinstance(prompt, str):
        if chat:
            prompt = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            prompt = tokenizer.encode(prompt)
    if isinstance(target, str):
        target = tokenizer.encode(target, add_special_tokens=False)
    return prompt, target


def _encode_pair(
    model: Model, prompt: Prompt, target: Prompt, chat: bool
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and its target, checked; raises ValueError."""
    config, tokenizer = model.config, model.tokenizer
    if isinstance(prompt, str) or isinstance(target, str):
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give token ids.")
        if chat and not tokenizer.has_chat_template:
            raise ValueError(f"{chat=}, but the model has no chat template.")
        prompt, target = _tokenize(tokenizer, prompt, target, chat)
    prompt = no_masks(config, token_ids(config, prompt))
    target = no_masks(config, token_ids(config, target, "target"), "target")
    if not target:
        raise ValueError("the target is empty: it must have at least one token.")
    if not prompt:
        if config.bos_id is None:
            raise ValueError("the prompt is empty and the model has no BOS token.")
        prompt = [config.bos_id]
    if len(prompt) + len(target) > config.max_positions:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and a target of {len(target)} exceed the "
            f"model's {config.max_positions} positions."
        )
    return prompt, target


def _encode_pairs(
    model: Model, prompts: Sequence[Prompt], targets: Sequence[Prompt], chat: bool
) -> list[tuple[list[int], list[int]]]:
    for name, given in {"prompts": prompts, "targets": targets}.items():
        if isinstance(given, str) or not hasattr(given, "__len__"):
            raise ValueError(f"{name}={given!r} must be a list, with one entry a prompt.")
    if len(prompts) != len(targets):
        raise ValueError(f"{len(prompts)} prompts were given for {len(targets)} targets.")
    pairs = []
    for index, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        try:
            pairs.append(_encode_pair(model, prompt, target, chat))
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    return pairs


def log_likelihood(
    model: Model,
    prompts: Sequence[Prompt],
    targets: Sequence[Prompt],
    *,
    num_samples: int = 128,
    batch_size: int = 8,
    seed: int | Sequence[int] = 0,
    block_length: int | None = None,
    cfg_scale: float = 0.0,
    order: Order = "random",
    chat: bool = False,
) -> list[Likelihood]:
    """Scores targets given prompts, as multiple-choice tasks and perplexity need it.

    Score answers with base models: published evaluations of chat models generate instead,
    since their likelihoods say little about their answers. A target is scored as it is: if
    an answer is to end there, the caller appends the end token.

    Bidirectional models (LLaDA, Dream) give a lower bound on the log-probability, estimated
    by masking a random number of the target's tokens (specs, LLaDA 3.1), or, in a given
    order, an exact value by the chain rule, at one forward a token (specs, Dream 3.3).
    Block-causal models are scored block by block with all blocks in one forward: exactly if
    `block_length` is 1, else by the same bound within each block. A target that leaves
    nothing to draw, such as a single token, is exact at one forward.

    Cross-entropies are float32, over the whole vocabulary.

    Args:
      model: from `load`.
      prompts: texts or lists of token ids. An empty one stands for the BOS token.
      targets: as many texts or lists of token ids. After a text, a text is tokenized
        together with it; white space at the prompt's end then belongs to the target.
      num_samples: draws of masks, where there is something to draw.
      batch_size: rows of a forward; results depend on it by rounding only.
      seed: prompt i draws from (seed, i). A list gives each prompt its own seed, and a
        prompt then has the same value in any list.
      block_length: of block-causal models, by default the one it was trained with.
      cfg_scale: classifier-free guidance of bidirectional models; 0 is off.
      order: "random", or of bidirectional models "left_to_right" or "right_to_left".
      chat: puts text prompts into the chat template.

    Returns:
      One `Likelihood` a prompt, in order.

    Raises:
      ValueError: for a wrong setting, prompt or target, in one line.
    """
    check_loaded(model)
    config = model.config
    _check_settings(config, num_samples, batch_size, block_length, cfg_scale, order)
    pairs = _encode_pairs(model, prompts, targets, chat)
    if config.attention == "block_causal":
        block_length = block_length or config.block_length
    jobs = []
    for (prompt, target), entropy in zip(pairs, _seeds(seed, len(pairs)), strict=True):
        ids, start = prompt + target, len(prompt)
        if order == "random":
            rng = np.random.default_rng(entropy)
            jobs.append(_random_job(config, ids, start, block_length, num_samples, rng))
        else:
            jobs.append(_ordered_job(ids, start, order))
    rows = (
        make_row(
            config,
            job.ids,
            masked,
            weight,
            prompt_length=job.prompt_length,
            block_length=job.block_length,
        )
        for job in jobs
        for masked, weight in job.masks
    )
    scores = iter(score_rows(model, rows, batch_size=batch_size, cfg_scale=cfg_scale))
    return [
        _estimate(job, np.stack([next(scores) for _ in range(job.num_rows)]))
        for job in jobs
    ]


def _token_rows(
    config: ModelConfig, ids: Sequence[int], prompt_length: int, scored: np.ndarray
) -> Iterator[ScoredRow]:
    """Rows whose values, in order, are log-probabilities of the tokens that are scored.

    Args:
      config: the model.
      ids: the text, n tokens.
      prompt_length: as of `make_row`.
      scored: bool `[n]`.
    """
    bidirectional = config.attention == "bidirectional"
    slots = np.arange(len(ids))
    alone = (slots == slot for slot in slots[scored])  # each among all the others
    for masked in alone if bidirectional else [scored]:
        yield make_row(
            config,
            ids,
            masked,
            masked.astype(np.float64),
            prompt_length=prompt_length,
            block_length=None if bidirectional else 1,
        )


def token_log_probs(
    model: Model,
    prompts: Sequence[Prompt],
    targets: Sequence[Prompt],
    *,
    batch_size: int = 8,
    chat: bool = False,
) -> list[list[float]]:
    """The log-probability of each token of finished texts, float32 cross-entropies.

    Block-causal models give that of each token after all that precedes it (blocks of one
    token, one forward a text); they add up to `log_likelihood` with `block_length=1`.
    Bidirectional models give that of each token among all the others, at one forward a
    token; they do not add up to anything (a pseudo-likelihood). What a token had when it
    was committed is `Output.confidence`, of other surroundings.

    Args:
      model: from `load`.
      prompts: texts or lists of token ids, as of `log_likelihood`.
      targets: as many, for example `Output.tokens`.
      batch_size: rows of a forward; results depend on it by rounding only.
      chat: puts text prompts into the chat template.

    Returns:
      For each prompt one number a target token, in nats.

    Raises:
      ValueError: for a wrong prompt or target, in one line.
    """
    check_loaded(model)
    config = model.config
    _check_settings(config, 1, batch_size, None, 0.0, "random")
    pairs = _encode_pairs(model, prompts, targets, chat)
    texts = []
    for prompt, target in pairs:
        ids = prompt + target
        texts.append((ids, np.arange(len(ids)) >= len(prompt)))
    values = rescore(model, texts, batch_size)
    return [
        row[len(prompt) :].tolist() for row, (prompt, _) in zip(values, pairs, strict=True)
    ]


def rescore(
    model: Model, texts: Sequence[tuple[Sequence[int], np.ndarray]], batch_size: int = 8
) -> list[np.ndarray]:
    """`token_log_probs` of some tokens of finished texts, whose ids are known to be good.

    Args:
      model: from `load`.
      texts: n token ids without masks, and bool `[n]`, which of them to score.
      batch_size: most rows of a forward.

    Returns:
      For each text float64 `[n]`, nats; 0 where nothing is scored.
    """
    bidirectional = model.config.attention == "bidirectional"
    counts = [
        int(scored.sum()) if bidirectional else int(scored.any()) for _, scored in texts
    ]
    rows = (
        row
        for (ids, scored), count in zip(texts, counts, strict=True)
        if count
        for row in _token_rows(model.config, ids, int(np.argmax(scored)), scored)
    )
    # No larger than need be: a forward's rows are filled up.
    size = min(batch_size, 1 << max(sum(counts) - 1, 0).bit_length())
    scores = iter(score_rows(model, rows, batch_size=size))
    found = []
    for (ids, scored), count in zip(texts, counts, strict=True):
        values = np.zeros(len(ids))
        if count:
            values[scored] = np.concatenate([next(scores) for _ in range(count)])
        found.append(values)
    return found
