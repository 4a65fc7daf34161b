"""A batch on its way through its programs, and what comes out: `Run`, `Output`."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dllm_jax.cache import KVCache
from dllm_jax.decoding import loop
from dllm_jax.decoding.base import UNDECIDED, DecodeInputs, DecodeState, ModelFns
from dllm_jax.likelihood import rescore
from dllm_jax.model import Model
from dllm_jax.params import param_shapes, weight_bytes
from dllm_jax.prompts import Row, buckets_of
from dllm_jax.request import Plan
from dllm_jax.settings import (
    traced_settings,
)
from dllm_jax.sharding import batch_specs, fetch, place
from dllm_jax.tokenizer import find_stop


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
    logprobs: dict[str, list[float]] | None = None  # of each token, if asked for, nats

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with exactly these fields."""
        return dataclasses.asdict(self)


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
            self._params = model.params, drafter.params
            # Drafters of one shape may differ in what their programs hold.
            self._pair = drafter.config, drafter.kv_dtype, drafter.divided
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
        own, other = (
            weight_bytes(
                one.config,
                param_shapes(one.config, one.dtype, quant=one.quant),
                tokens,
            )
            for one in pair
        )
        of_target = sum(forwards.values()) - forwards["draft"] - forwards["prefill"]
        cost = of_target + forwards["draft"] * other / own
        alone = report["forwards_of_target_alone"]
        speedup = alone / cost if cost else 1.0
        return {**report, "draft_cost": other / own, "expected_speedup": speedup}

    def outputs(self, rows: Sequence[int]) -> list[Output]:
        """The finished rows; what is to be re-scored of them, in forwards of several."""
        outs = [self._output(row) for row in rows]
        asked = self._request.logprobs
        found: list[dict[str, list[float]]] = [{} for _ in outs]
        if asked in ("commit", "both"):
            # JSON has no infinity: what is less than the smallest number counts as that.
            least = np.finfo(np.float32).tiny
            for values, out in zip(found, outs, strict=True):
                confidence = np.array(out.confidence, np.float32)
                values["commit"] = np.log(np.maximum(confidence, least)).tolist()
        if asked in ("rescored", "both"):
            texts = []
            for row, out in zip(rows, outs, strict=True):
                begin = self._rows[row].shown
                filled = np.array(out.unmask_forward, np.int32) != UNDECIDED
                ids = [*self._rows[row].ids[:begin], *out.tokens]
                texts.append((ids, np.concatenate([np.zeros(begin, bool), filled])))
            scores = rescore(self._model, texts)
            for row, values, score in zip(rows, found, scores, strict=True):
                values["rescored"] = score[self._rows[row].shown :].tolist()
        return [
            dataclasses.replace(out, logprobs=values or None)
            for out, values in zip(outs, found, strict=True)
        ]

    def _output(self, row: int) -> Output:
        """The finished row, without log-probabilities."""
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
