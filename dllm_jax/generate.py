"""The library's front door: `generate`, `infill`, `stream`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dllm_jax.cache import KVCache
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import Decoder, loop
from dllm_jax.decoding.base import UNDECIDED, DecodeInputs, DecodeState, ModelFns
from dllm_jax.model import Model, check_pair
from dllm_jax.params import weight_bytes
from dllm_jax.prompts import MARKER, Prompt, Row, encode_holes, encode_prompt
from dllm_jax.settings import (
    canonical_names,
    default_decoder,
    describe_settings,
    find_decoder,
    find_preset,
    resolve_settings,
    traced_settings,
)
from dllm_jax.sharding import batch_specs, fetch, place
from dllm_jax.tokenizer import TextStream, find_stop

MAX_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one prompt, and the times of the batch that it was in."""

    prompt_tokens: int
    generated_tokens: int  # up to and including the first stop id
    forwards: dict[str, int]  # passes the row took part in, by kind, and their total
    positions: int  # tokens of the row that these passes processed
    tokens_per_forward: float  # generated_tokens / forwards["total"]
    cache: str  # "exact" | "none (exact)" | "approximate (...)"
    compile_seconds: float  # of the batch; 0 when the programs were compiled before
    decode_seconds: float  # of the batch, without compilation
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # the decoder's own


@dataclasses.dataclass(frozen=True)
class Output:
    """What one prompt gave."""

    tokens: list[int]  # generated ids, without prompt and stop id; infilled: all ids
    text: str  # "" if the model has no tokenizer
    finish_reason: str  # "eos" | "stop" | "length" | "filled"
    stats: Stats
    confidence: list[float]  # of each token, when it was unmasked; 1 if it was given
    unmask_forward: list[int]  # which of the row's denoising forwards unmasked it; -1 ..
    trace: list[dict[str, Any]] | None = None  # one record a slot, if asked for

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with exactly these fields."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked request: everything that a run needs besides weights."""

    decoder: Decoder
    settings: Any
    max_new_tokens: int
    seed: int | tuple[int, ...]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    chat: bool | None
    marker: str | None = None  # of holes, for infilling; max_new_tokens then is 0
    trace: bool = False

    def describe(self) -> dict[str, Any]:
        """The resolved settings, for printing."""
        length: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.marker is not None:
            length = {"infill": self.marker}
        return {
            "decoder": self.decoder.name,
            **length,
            "seed": self.seed,
            **describe_settings(self.settings),
        }


def plan(
    config: ModelConfig,
    decoder: str | None = None,
    *,
    max_new_tokens: int | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chat: bool | None = None,
    preset: str | None = None,
    steps: int | None = None,
    trace: bool = False,
    **settings: Any,
) -> Plan:
    """Checks a request against a model's config. Arguments as `generate`."""
    chosen = find_preset(preset) if preset else {}
    own = chosen.pop("decoder", None)
    usual = chosen.pop("max_new_tokens", MAX_NEW_TOKENS)
    if max_new_tokens is None:
        max_new_tokens = usual
    method = find_decoder(decoder or own or default_decoder(config))
    given = {key: value for key, value in settings.items() if value is not None}
    given = {**chosen, **canonical_names(method, given)}
    if type(max_new_tokens) is not int or not 1 <= max_new_tokens <= config.max_positions:
        raise ValueError(
            f"{max_new_tokens=} must be a whole number from 1 to the model's "
            f"{config.max_positions} positions."
        )
    resolved = resolve_settings(method, config, given)
    if steps is not None:
        given["denoising_steps"] = _steps_per_block(steps, max_new_tokens, given, resolved)
        resolved = resolve_settings(method, config, given)
    seeds = tuple(seed) if isinstance(seed, list | tuple) else (seed,)
    if not all(type(s) is int and 0 <= s < 2**32 for s in seeds):
        raise ValueError(f"{seed=} must be in [0, 2**32).")
    stops = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"{stop=} must be strings that are not empty.")
    ids = config.eos_ids if stop_ids is None else stop_ids
    valid = isinstance(ids, list | tuple) and all(
        type(i) is int and 0 <= i < config.vocab_size and i != config.mask_id for i in ids
    )
    if not valid:
        raise ValueError(
            f"{stop_ids=} must be a list of ids in [0, {config.vocab_size}), without the "
            "mask id."
        )
    if not isinstance(trace, bool):
        raise ValueError(f"{trace=} must be True or False.")
    seed = seeds if isinstance(seed, list | tuple) else seed
    ids = tuple(ids)
    return Plan(method, resolved, max_new_tokens, seed, stops, ids, chat, trace=trace)


def plan_infill(
    config: ModelConfig,
    decoder: str | None = None,
    *,
    marker: str = MARKER,
    seed: int | Sequence[int] = 0,
    preset: str | None = None,
    **settings: Any,
) -> Plan:
    """Checks a request for infilling against a model's config. Arguments as `infill`."""
    if config.attention != "bidirectional":
        raise ValueError(
            "infilling needs a model that sees what follows a hole (attention "
            f"'bidirectional'); this one has attention={config.attention!r}: a hole would "
            "see its own block and the text before it, but not after. It can continue a "
            "prompt (generate)."
        )
    for name in ("max_new_tokens", "stop", "stop_ids", "steps", "chat"):
        if name in settings:
            raise ValueError(f"{name}={settings[name]!r} does not apply to infilling.")
    if not isinstance(marker, str) or len(marker) < 2:
        raise ValueError(f"{marker=} must be a text of at least two characters.")
    # The row's own length counts, not the usual number of new tokens or a preset's.
    unused = {"max_new_tokens": 1, "stop_ids": ()}
    request = plan(config, decoder, seed=seed, preset=preset, **unused, **settings)
    return dataclasses.replace(request, max_new_tokens=0, marker=marker)


def _steps_per_block(steps: int, max_new_tokens: int, given: dict, resolved: Any) -> int:
    """Denoising steps of one block, from the number of steps in all."""
    if "denoising_steps" in given:
        raise ValueError(
            f"{steps=} (in all) and denoising_steps (per block) are both given: choose one."
        )
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{steps=} must be a whole number of at least 1.")
    if not hasattr(resolved, "denoising_steps"):
        raise ValueError(f"{steps=} does not apply: this decoder has no denoising_steps.")
    length = resolved.block_length or max_new_tokens  # 0: all of it is one block
    per_block, rest = divmod(steps * length, max_new_tokens)
    if per_block < 1 or rest:
        raise ValueError(
            f"{steps=} cannot be spread evenly over {max_new_tokens} tokens in blocks of "
            f"{length}: use a multiple of {max_new_tokens / length:g}."
        )
    return per_block


def bucket(size: int) -> int:
    """The length that a program is compiled for: the next multiple of 64, 256 or 1024."""
    unit = 64 if size <= 1024 else 256 if size <= 8192 else 1024
    return -(-max(size, 1) // unit) * unit


def _batch_inputs(
    request: Plan,
    mask_id: int,
    rows: Sequence[Row | None],
    indices: Sequence[int],
    width: int,
) -> DecodeInputs:
    """The arrays of a batch.

    Args:
      request: its seed and stop ids count.
      mask_id: of the model.
      rows: None for one that does nothing.
      indices: of the rows among all prompts.
      width: slots of the longest prompt.
    """
    batch = len(rows)
    lengths, new = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    prompt = np.full((batch, width), mask_id, np.int32)
    for number, row in enumerate(rows):
        if row is not None:
            prompt[number, : len(row.ids)] = row.ids
            lengths[number] = row.start
            new[number] = row.end - row.start
    if isinstance(request.seed, int):
        seeds, streams = [request.seed] * batch, indices
    else:
        used = zip(rows, indices, strict=True)
        seeds = [0 if row is None else request.seed[i] for row, i in used]
        streams = [0] * batch
    keys = jax.vmap(lambda s, i: jax.random.fold_in(jax.random.key(s), i))(
        jnp.array(seeds, jnp.uint32), jnp.array(streams, jnp.uint32)
    )
    stop_ids = np.full(-(-max(len(request.stop_ids), 1) // 8) * 8, -1, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return DecodeInputs(
        jnp.asarray(prompt),
        jnp.asarray(lengths),
        jnp.asarray(new),
        keys,
        jnp.asarray(stop_ids),
    )


class Run:
    """A batch on its way through its programs: start (prefill), go on (loop), refill.

    Args:
      model: the model.
      request: what to do.
      rows: at least one; the batch is filled up to a power of two, and to as many rows as
        the mesh divides.
      indices: of the rows among all prompts.
      drafter: the model that drafts, or None.
      buckets: slots of the longest prompt and of the canvas; as the rows need if None.
    """

    def __init__(
        self,
        model: Model,
        request: Plan,
        rows: Sequence[Row],
        indices: Sequence[int],
        drafter: Model | None = None,
        buckets: tuple[int, int] | None = None,
    ):
        self._model, self._request, self._drafter = model, request, drafter
        self._params, self._pair = model.params, None
        self._specs = None if model.mesh is None else model.specs
        self._whole_drafter = drafter is not None and not drafter.divided
        if drafter is not None:
            self._params, self._pair = (model.params, drafter.params), drafter.config
            self._specs = model.mesh and (model.specs, drafter.specs)
        self._compile_seconds = self._decode_seconds = 0.0
        self._settings = place(model.mesh, traced_settings(request.settings), P())
        parts = 1 if model.mesh is None else model.mesh.shape["data"]
        self.size = -(-(1 << (len(rows) - 1).bit_length()) // parts) * parts
        spare = self.size - len(rows)
        self._rows: list[Row | None] = [*rows, *[None] * spare]
        self._buckets = buckets or buckets_of(rows)
        self.state = self._start(self._rows, [*indices, *[0] * spare])
        self._state_specs = batch_specs(self.state, self._whole_drafter)
        self._look()

    def _start(self, rows: Sequence[Row | None], indices: Sequence[int]) -> DecodeState:
        """The state of a batch with its prompts stored."""
        model, decoder = self._model, self._request.decoder
        width, canvas_length = self._buckets
        inputs = _batch_inputs(self._request, model.config.mask_id, rows, indices, width)
        inputs = place(model.mesh, inputs, batch_specs(inputs))

        def start(params, settings, inputs, whole=False):
            fns = self._fns(params, whole)
            return decoder.init(fns, settings, inputs, canvas_length)

        def build():
            out_specs = None
            if model.mesh is not None:
                # An undivided model's state has the structure of a divided one's.
                undivided = functools.partial(start, whole=True)
                shapes = jax.eval_shape(undivided, self._params, self._settings, inputs)
                out_specs = batch_specs(shapes, self._whole_drafter)
            in_specs = (self._specs, P(), batch_specs(inputs))
            return model.jit(start, in_specs, out_specs)

        key = (decoder.name, "start", canvas_length, self._pair)
        return self._call(key, build, (self._params, self._settings, inputs))

    def refill(self, rows: dict[int, tuple[Row, int]]) -> None:
        """Puts new prompts, with their indices, into rows that are done.

        No longer than the batch's buckets. All programs are those of the batch.
        """
        fresh = [rows[row][0] if row in rows else None for row in range(self.size)]
        indices = [rows[row][1] if row in rows else 0 for row in range(self.size)]
        new = self._start(fresh, indices)
        self._rows = [f or old for f, old in zip(fresh, self._rows, strict=True)]

        def merge(old, new, taken):
            def choose(before, after, spec):
                if "data" not in spec:
                    return before
                axis = tuple(spec).index("data")
                shape = [-1 if a == axis else 1 for a in range(before.ndim)]
                return jnp.where(taken.reshape(shape), after, before)

            return jax.tree.map(choose, old, new, self._state_specs)

        def build():
            specs = (self._state_specs, self._state_specs, P("data"))
            return self._model.jit(merge, specs, self._state_specs, donate_argnums=0)

        taken = jnp.array([row in rows for row in range(self.size)])
        args = (self.state, new, place(self._model.mesh, taken, P("data")))
        self.state = self._call((self._request.decoder.name, "refill"), build, args)
        self._look()

    def _look(self) -> None:
        """Copies to the host what is known of each row, but for caches and keys."""

        def small(leaf):
            if isinstance(leaf, KVCache) or leaf.ndim > 2:
                return None
            return None if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

        seen = jax.tree.map(small, self.state, is_leaf=lambda x: isinstance(x, KVCache))
        self.seen: DecodeState = fetch(seen)

    def _fns(self, params: Any, whole: bool = False) -> ModelFns:
        """The model as the decoder sees it, with its drafter."""

        def fns(model, own):
            return model.undivided_fns(own) if whole else model.fns(own)

        if self._drafter is None:
            return fns(self._model, params)
        own, other = params
        return fns(self._model, own)._replace(draft=fns(self._drafter, other))

    def _call(self, key: tuple, build: Callable[[], Callable], args: tuple) -> DecodeState:
        """Runs a program and books its time as compilation or decoding."""
        compiled, began = self._model.compile_seconds, time.perf_counter()
        state = self._model.run_program(key, build, args)
        jax.block_until_ready(state.done)
        compiled = self._model.compile_seconds - compiled
        self._compile_seconds += compiled
        self._decode_seconds += time.perf_counter() - began - compiled
        return state

    def advance(self, pause: bool = False, ends: int = 0, one_step: bool = False) -> bool:
        """Goes on to the end, to the next finished block, until rows end, or by one step.

        Args:
          pause: whether to come back as soon as a row has finished a block.
          ends: come back as soon as so many rows have ended; 0 is off.
          one_step: whether to come back after a step; another program than the loop's.

        Returns:
          Whether all rows are done.
        """
        decoder = self._request.decoder

        def go_on(state, params, settings, ends, pause):
            fns = self._fns(params)
            step = functools.partial(decoder.step, fns, settings)
            most_steps = decoder.most_steps(settings, state.canvas.shape[1])
            if one_step:
                most_steps = 1
            return loop.run(step, state, pause, most_steps, ends)

        def build():
            in_specs = (self._state_specs, self._specs, P(), P(), P())
            return self._model.jit(go_on, in_specs, self._state_specs, donate_argnums=0)

        when = place(self._model.mesh, (jnp.int32(ends), jnp.asarray(pause)), P())
        args = (self.state, self._params, self._settings, *when)
        key = (decoder.name, "go_on", self._pair, one_step)
        self.state = self._call(key, build, args)
        self._look()
        return bool(np.all(self.seen.done))

    def canvas(self, row: int) -> list[int]:
        """The slots of a row that may be returned, masks among them."""
        return self.seen.canvas[row, self._rows[row].shown : self._rows[row].end].tolist()

    def committed(self, row: int) -> list[int]:
        """The ids of a row that will not change, up to its first stop id."""
        canvas = self.seen.canvas[row]
        begin, end = self._rows[row].shown, int(self.seen.end[row])
        if not self.seen.done[row]:
            end = min(end, int(self.seen.cursor[row]))  # the open block may still change
        ids = canvas[begin:end].tolist()
        stops = {self._model.config.mask_id, *self._request.stop_ids}
        cut = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        return ids[:cut]

    def has_stop(self, row: int) -> bool:
        """Whether a row's committed text holds a stop string."""
        text = self._model.tokenizer.decode(self.committed(row))
        return find_stop(text, self._request.stop) is not None

    def end_rows(self, rows: list[int]) -> None:
        """Ends rows early; the masks that they still have are not part of their output."""
        done = self.seen.done | np.isin(np.arange(len(self.seen.done)), rows)
        self.seen = self.seen.replace(done=done)
        done = place(self._model.mesh, jnp.asarray(done), P("data"))
        self.state = self.state.replace(done=done)

    def _cache_label(self) -> str:
        label = self._request.decoder.cache(self._request.settings)
        cache = self.state.cache
        if cache is None or cache.k_scale is None:
            return label
        return "approximate (int8)" if label == "exact" else f"{label}, int8"

    def _report(self, row: int, forwards: dict[str, int]) -> dict[str, Any]:
        """What the decoder says of a row, and what a drafter is worth to it."""
        request = self._request
        report = request.decoder.report(request.settings, self.seen, row)
        if self._drafter is None:
            return report
        # The weights that a forward reads are what it costs at small batches.
        tokens, pair = request.settings.block_length, (self._model, self._drafter)
        own, other = (weight_bytes(one.config, one.params, tokens) for one in pair)
        of_target = sum(forwards.values()) - forwards["draft"] - forwards["prefill"]
        cost = of_target + forwards["draft"] * other / own
        alone = report["forwards_of_target_alone"]
        speedup = alone / cost if cost else 1.0
        return {**report, "draft_cost": other / own, "expected_speedup": speedup}

    def output(self, row: int) -> Output:
        """The finished row."""
        model, request = self._model, self._request
        tokens = self.committed(row)
        text = model.tokenizer.decode(tokens) if model.tokenizer else ""
        begin, given = self._rows[row].shown, self._rows[row].ids
        whole = "length" if request.marker is None else "filled"
        at_stop_id = len(tokens) < self._rows[row].end - begin
        reason = "eos" if at_stop_id else whole
        generated = len(tokens) + at_stop_id
        if request.marker is not None:
            generated = given.count(model.config.mask_id)
        cut = find_stop(text, request.stop)
        if cut is not None:
            # The fewest tokens whose text reaches the stop string.
            keep = next(
                n
                for n in range(len(tokens) + 1)
                if len(model.tokenizer.decode(tokens[:n])) >= cut
            )
            tokens, text, reason, generated = tokens[:keep], text[:cut], "stop", keep
        counts = jax.tree.map(lambda x: int(x[row]), vars(self.seen.forwards))
        positions = counts.pop("positions")
        total = sum(counts.values())
        span = slice(begin, begin + len(tokens))
        unmask_forward = self.seen.unmask_forward[row, span]
        confidence = self.seen.confidence[row, span]
        confidence = np.where(unmask_forward == UNDECIDED, 1.0, confidence)
        return Output(
            tokens=tokens,
            text=text,
            finish_reason=reason,
            stats=Stats(
                prompt_tokens=self._rows[row].end - begin - generated
                if request.marker is not None
                else begin,
                generated_tokens=generated,
                forwards={**counts, "total": total},
                positions=positions,
                tokens_per_forward=generated / max(total, 1),
                cache=self._cache_label(),
                compile_seconds=round(self._compile_seconds, 4),
                decode_seconds=round(self._decode_seconds, 4),
                more=self._report(row, counts),
            ),
            confidence=confidence.tolist(),
            unmask_forward=unmask_forward.tolist(),
            trace=self._trace(row) if request.trace else None,
        )

    def _trace(self, row: int) -> list[dict[str, Any]]:
        """What was unmasked, in order of slots; JSON-ready."""
        names = self._request.decoder.rules(self._request.settings)
        state, model = self.seen, self._model
        arrays = (state.canvas, state.unmask_forward, state.confidence, state.rule)
        token, forward, confidence, rule = (np.asarray(x[row]).tolist() for x in arrays)
        slots = [s for s in range(int(state.end[row])) if forward[s] != UNDECIDED]
        return [
            {
                "slot": slot,
                "token": token[slot],
                "text": model.tokenizer.decode([token[slot]]) if model.tokenizer else "",
                "forward": forward[slot],
                "confidence": confidence[slot],
                "rule": names[rule[slot]],
            }
            for slot in slots
        ]


def buckets_of(rows: Sequence[Row]) -> tuple[int, int]:
    """Slots of the prompts and of the canvas that rows need, in whole buckets."""
    return bucket(max(len(row.ids) for row in rows)), bucket(max(row.end for row in rows))


def encode_row(model: Model, request: Plan, prompt: Prompt) -> Row:
    """The row of a prompt; raises ValueError for a prompt that cannot be one."""
    if request.stop and model.tokenizer is None:
        raise ValueError(f"stop={request.stop!r} needs a model with a tokenizer.")
    config, tokenizer = model.config, model.tokenizer
    if request.marker is not None:
        return encode_holes(config, tokenizer, prompt, request.marker)
    return encode_prompt(config, tokenizer, prompt, request.chat, request.max_new_tokens)


def _encode_all(model: Model, request: Plan, prompts: Sequence[Prompt]) -> list[Row]:
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.append(encode_row(model, request, prompt))
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    if not isinstance(request.seed, int) and len(request.seed) != len(rows):
        raise ValueError(f"{len(request.seed)} seeds were given for {len(rows)} prompts.")
    return rows


def check_drafter(config: ModelConfig, request: Plan, drafter: ModelConfig | None) -> None:
    """Raises ValueError unless the decoder has the models that it needs."""
    name = request.decoder.name
    if request.decoder.drafts and drafter is None:
        raise ValueError(
            f"decoder {name!r} needs draft_model, a model that drafts (the same one may)."
        )
    if drafter is not None:
        if not request.decoder.drafts:
            raise ValueError(f"draft_model is given, but not used by decoder {name!r}.")
        check_pair(config, drafter)


def check_models(model: Model, request: Plan, drafter: Model | None) -> None:
    """`check_drafter` for loaded models, which must be on one mesh."""
    check_drafter(model.config, request, None if drafter is None else drafter.config)
    if drafter is not None and drafter.mesh != model.mesh:
        raise ValueError("draft_model must be loaded with the model's mesh.")


def run_plan(
    model: Model,
    request: Plan,
    prompts: Sequence[Prompt],
    batch_size: int | None = None,
    draft_model: Model | None = None,
) -> list[Output]:
    """Decodes prompts as `request` says; as `generate` after its settings are checked."""
    check_models(model, request, draft_model)
    rows = _encode_all(model, request, prompts)
    size = batch_size or max(len(rows), 1)
    outputs: list[Output] = []
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        indices = list(range(begin, begin + len(part)))
        run = Run(model, request, part, indices, draft_model)
        if request.stop:
            # A stop string can only be seen in text, so look after every block.
            while not run.advance(pause=True):
                run.end_rows([row for row in range(len(part)) if run.has_stop(row)])
        else:
            run.advance()
        outputs += [run.output(row) for row in range(len(part))]
    return outputs


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decoder: str | None = None,
    *,
    max_new_tokens: int | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chat: bool | None = None,
    preset: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    draft_model: Model | None = None,
    trace: bool = False,
    **settings: Any,
) -> list[Output]:
    """Decodes a batch of prompts; row i does not depend on the other rows.

    Args:
      model: from `load`.
      prompts: texts or lists of token ids.
      decoder: "block", "ar", ..., by default the preset's, else what the model is for.
      max_new_tokens: most tokens to generate for each prompt; the preset's if None, else
        128. Blocks are denoised whole,
        so it can change which slots the last block has; it never cuts the returned text
        shorter than asked.
      seed: prompt i draws from (seed, i). A list gives each prompt its own seed, and a
        prompt then gives the same tokens in any batch.
      stop: strings that end the text; they are not returned.
      stop_ids: ids that end a row instead of the model's own end ids.
      chat: whether to put text prompts into the chat template; by default if there is one.
      preset: a published setting, such as "sdar-dynamic"; other arguments override it.
      steps: denoising steps in all, spread evenly over the blocks; the alternative to
        `denoising_steps`, which counts per block.
      batch_size: rows decoded at once; all of them if None.
      draft_model: the model that drafts, for decoders that need one (`simsd`).
      trace: whether each `Output.trace` tells, for every slot that was unmasked (those
        behind the end too): slot, token, text, forward, confidence, and the name of the
        decoder's rule that chose it.
      **settings: the decoder's settings, by name or alias.

    Returns:
      One `Output` a prompt, in order.

    Raises:
      ValueError: for a wrong setting or prompt, in one line.
    """
    request = plan(
        model.config,
        decoder,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop,
        stop_ids=stop_ids,
        chat=chat,
        preset=preset,
        steps=steps,
        trace=trace,
        **settings,
    )
    return _run_checked(model, request, prompts, batch_size, draft_model)


def infill(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decoder: str | None = None,
    *,
    marker: str = MARKER,
    seed: int | Sequence[int] = 0,
    preset: str | None = None,
    batch_size: int | None = None,
    trace: bool = False,
    **settings: Any,
) -> list[Output]:
    """Fills the holes of texts in place; every hole sees the text on both sides.

    The text from its first hole on is denoised as the canvas of a generation is, the given
    tokens standing still; blocks count slots from the first hole. End tokens are tokens
    like others (`logits_eos_inf=True` of decoder `masked` keeps the padding one out).

    Args:
      model: from `load`, of a bidirectional family (LLaDA, Dream).
      prompts: texts or lists of token ids, not put into a chat template.
      decoder: as `generate`.
      marker: stands for one missing token in a text; "[MASK:8]" for eight, likewise for
        other markers. In ids the mask id does.
      seed: as `generate`.
      preset: as `generate`.
      batch_size: rows decoded at once; all of them if None.
      trace: as `generate`.
      **settings: the decoder's settings, by name or alias.

    Returns:
      One `Output` a prompt, of the whole completed text.

    Raises:
      ValueError: for a wrong setting or prompt, in one line.
    """
    given = {"marker": marker, "seed": seed, "preset": preset, "trace": trace}
    request = plan_infill(model.config, decoder, **given, **settings)
    return _run_checked(model, request, prompts, batch_size)


def _run_checked(
    model: Model,
    request: Plan,
    prompts: Prompt | Sequence[Prompt],
    batch_size: int | None,
    draft_model: Model | None = None,
) -> list[Output]:
    """`run_plan` for one prompt or several."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"{batch_size=} must be a whole number of at least 1.")
    if not hasattr(prompts, "__len__"):
        raise ValueError(f"{prompts=} must be a text, a list of ids, or a list of them.")
    one = isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(p, int | np.integer) for p in prompts)
    )
    return run_plan(
        model, request, [prompts] if one else list(prompts), batch_size, draft_model
    )


def stream_plan(
    model: Model, request: Plan, prompt: Prompt, draft_model: Model | None = None
) -> Iterator[tuple[str, Output | None]]:
    """Decodes one prompt block by block: pieces of text, then ("", the output)."""
    check_models(model, request, draft_model)
    rows = _encode_all(model, request, [prompt])
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text to stream.")
    run = Run(model, request, rows, [0], draft_model)
    text = TextStream(model.tokenizer, request.stop)
    ended = False
    while not ended and not text.stopped:
        ended = run.advance(pause=True)
        piece = text.push(run.committed(0), final=ended)
        if piece:
            yield piece, None
    yield "", run.output(0)


def watch_plan(
    model: Model, request: Plan, prompt: Prompt, draft_model: Model | None = None
) -> Iterator[tuple[list[int], Output | None]]:
    """Decodes one prompt step by step: its canvas after each, at last with the output.

    A step is one forward (`block` also stores in it, others may take one more to store).
    Much slower than the loop on the device, and the same tokens.
    """
    check_models(model, request, draft_model)
    run = Run(model, request, _encode_all(model, request, [prompt]), [0], draft_model)
    ended = False
    while not ended:
        yield run.canvas(0), None
        ended = run.advance(one_step=True)
        ended |= bool(request.stop) and run.has_stop(0)
    yield run.canvas(0), run.output(0)


def stream(
    model: Model,
    prompt: Prompt,
    decoder: str | None = None,
    *,
    draft_model: Model | None = None,
    **arguments: Any,
) -> Iterator[str]:
    """Decodes one prompt, yielding committed text block by block.

    Pieces never end inside a character and join to `generate`'s text. Arguments as
    `generate`, but for `batch_size`; wrong settings raise at once.
    """
    request = plan(model.config, decoder, **arguments)
    check_models(model, request, draft_model)
    pieces = stream_plan(model, request, prompt, draft_model)
    return (piece for piece, _ in pieces if piece)
