"""The library's front door: `load`, `generate`, `stream`."""

import dataclasses
import functools
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import head, transformer
from dllm_jax.cache import init_cache
from dllm_jax.checkpoint import (
    DTYPES,
    SIDECAR,
    read_hf_params,
    read_params,
    read_sidecar,
)
from dllm_jax.compiler import compiler_options
from dllm_jax.config import ModelConfig
from dllm_jax.decoding import Decoder, loop
from dllm_jax.decoding.base import DecodeInputs, DecodeState, ModelFns
from dllm_jax.hf import CheckpointError, HFCheckpoint
from dllm_jax.params import Params
from dllm_jax.settings import (
    canonical_names,
    default_decoder,
    describe_settings,
    find_decoder,
    find_preset,
    resolve_settings,
    traced_settings,
)
from dllm_jax.tokenizer import TextStream, Tokenizer, find_stop

DEMO_MODELS = ("demo", "demo-draft", "demo-llada")
Prompt = str | Sequence[int]


class Model:
    """A loaded model: parameters, config, tokenizer, and its compiled programs."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        name: str = "model",
    ):
        self.params = params
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.num_traces = 0  # times that a program was traced, for tests
        self.compile_seconds = 0.0
        self._programs: dict[Any, Callable] = {}

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameters and the cache."""
        return self.params.embed.dtype

    def fns(self, params: Params) -> ModelFns:
        """The model as decoders see it."""
        return model_fns(params, self.config)

    def run_program(self, key: tuple, build: Callable[[], Callable], args: tuple) -> Any:
        """Calls a jitted function, compiling it once for each key and argument shapes."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        full_key = (key, shapes, structure)
        if full_key not in self._programs:
            started = time.perf_counter()
            self.num_traces += 1
            options = compiler_options(jax.devices()[0].device_kind)
            self._programs[full_key] = build().lower(*args).compile(options)
            self.compile_seconds += time.perf_counter() - started
        return self._programs[full_key](*args)


def model_fns(
    params: Params, config: ModelConfig, implementation: str = "auto"
) -> ModelFns:
    """Binds parameters, and the attention of `attention.attend`, to the transformer."""
    return ModelFns(
        config=config,
        forward=functools.partial(
            transformer.forward, params, config, implementation=implementation
        ),
        logits=functools.partial(transformer.logits, params),
        init_cache=lambda batch, slots: init_cache(
            config, batch, slots, params.embed.dtype
        ),
        propose=functools.partial(head.propose_greedily, params, mask_id=config.mask_id),
    )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one prompt, and the times of the batch that it was in."""

    prompt_tokens: int
    generated_tokens: int  # up to and including the first stop id
    forwards: dict[str, int]  # passes the row took part in, by kind, and their total
    positions: int  # tokens of the row that these passes processed
    tokens_per_forward: float  # generated_tokens / forwards["total"]
    compile_seconds: float  # of the batch; 0 when the programs were compiled before
    decode_seconds: float  # of the batch, without compilation


@dataclasses.dataclass(frozen=True)
class Output:
    """What one prompt gave."""

    tokens: list[int]  # generated ids, without prompt and stop id
    text: str  # "" if the model has no tokenizer
    finish_reason: str  # "eos" | "stop" | "length"
    stats: Stats
    confidence: list[float]  # of each token, when it was unmasked
    unmask_forward: list[int]  # which of the row's denoising forwards unmasked it

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

    def describe(self) -> dict[str, Any]:
        """The resolved settings, for printing."""
        return {
            "decoder": self.decoder.name,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            **describe_settings(self.settings),
        }


def resolve_model_path(name: str) -> Path:
    """The directory of a model: a demo's name, or a path.

    Raises:
      ValueError: if there is no such directory.
    """
    name = os.fspath(name)
    if name in DEMO_MODELS:
        return Path(str(resources.files("dllm_jax") / "data" / name))
    path = Path(name)
    if not path.is_dir():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        hint = f"; for a hub id, run `python -m convert {name} DIR` first" if hub else ""
        raise ValueError(
            f"model={name!r} is neither a directory nor one of "
            f"{', '.join(DEMO_MODELS)}{hint}."
        )
    return path


def load_config(name: str) -> ModelConfig:
    """The config of a model, without its weights; raises ValueError if it has none."""
    path = resolve_model_path(name)
    if (path / SIDECAR).exists():
        return read_sidecar(path).config
    return HFCheckpoint(path).config


def load(
    name: str = "demo",
    *,
    dtype: str = "auto",
    family: str | None = None,
    mask_id: int | None = None,
) -> Model:
    """Loads a model.

    Args:
      name: a converted directory, a Hugging Face directory (converted in memory), or
        "demo", "demo-draft", "demo-llada".
      dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on TPU and GPU,
        float32 on CPU.
      family: overrides what config.json says of the architecture (HF directories only).
      mask_id: overrides the mask id (HF directories only).

    Returns:
      The model, on the default device.

    Raises:
      ValueError: if there is no such model, or it is damaged.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} must be one of auto, {', '.join(DTYPES)}.")
    path = resolve_model_path(name)
    if (path / SIDECAR).exists():
        if family is not None or mask_id is not None:
            raise ValueError(
                f"{family=} and {mask_id=} are fixed at conversion: {name} is converted."
            )
        sidecar = read_sidecar(path)
        config = sidecar.config
        params = read_params(path, sidecar, DTYPES[dtype])
    else:
        checkpoint = HFCheckpoint(path, family, mask_id)
        config = checkpoint.config
        params = read_hf_params(checkpoint, DTYPES[dtype])
    has_tokenizer = any((path / file).exists() for file in ("tokenizer.json", "vocab.json"))
    tokenizer = Tokenizer(path, config.mask_id) if has_tokenizer else None
    return Model(params, config, tokenizer, os.fspath(name))


def plan(
    config: ModelConfig,
    decoder: str | None = None,
    *,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chat: bool | None = None,
    preset: str | None = None,
    steps: int | None = None,
    **settings: Any,
) -> Plan:
    """Checks a request against a model's config. Arguments as `generate`."""
    chosen = find_preset(preset) if preset else {}
    own = chosen.pop("decoder", None)
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
    seed = seeds if isinstance(seed, list | tuple) else seed
    return Plan(method, resolved, max_new_tokens, seed, stops, tuple(ids), chat)


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


def encode_prompt(
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    chat: bool | None,
    max_new_tokens: int,
) -> list[int]:
    """Token ids of one prompt, checked; raises ValueError."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompts as token ids.")
        if chat and not tokenizer.has_chat_template:
            raise ValueError("chat=True, but the model has no chat template.")
        if chat or (chat is None and tokenizer.has_chat_template):
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
    else:
        try:
            ids = [operator.index(i) for i in prompt if not isinstance(i, bool)]
            whole = len(ids) == len(prompt)
        except TypeError:
            whole = False
        if not whole:
            raise ValueError(f"prompt {prompt!r} must be a text or a list of token ids.")
    if not ids:
        if model_config.bos_id is None:
            raise ValueError("the prompt is empty and the model has no BOS token.")
        ids = [model_config.bos_id]
    bad = [i for i in ids if not 0 <= i < model_config.vocab_size]
    if bad:
        raise ValueError(
            f"token id {bad[0]} is outside the vocabulary of {model_config.vocab_size}."
        )
    if model_config.mask_id in ids:
        raise ValueError(
            f"token id {model_config.mask_id} is the mask token: a prompt must not "
            "contain it."
        )
    if len(ids) + max_new_tokens > model_config.max_positions:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed "
            f"the model's {model_config.max_positions} positions."
        )
    return ids


def bucket(size: int) -> int:
    """The length that a program is compiled for: the next multiple of 64, 256 or 1024."""
    unit = 64 if size <= 1024 else 256 if size <= 8192 else 1024
    return -(-max(size, 1) // unit) * unit


def _batch_inputs(request: Plan, rows: list[list[int]], indices: list[int]):
    """The arrays of a batch, filled up to a power of two with rows that do nothing."""
    batch = 1 << (len(rows) - 1).bit_length()
    lengths = np.zeros(batch, np.int32)
    prompt = np.zeros((batch, bucket(max(map(len, rows)))), np.int32)
    new = np.zeros(batch, np.int32)
    for row, ids in enumerate(rows):
        prompt[row, : len(ids)] = ids
        lengths[row] = len(ids)
        new[row] = request.max_new_tokens
    spare = [0] * (batch - len(rows))
    if isinstance(request.seed, int):
        seeds, streams = [request.seed] * batch, [*indices, *spare]
    else:
        seeds, streams = [*(request.seed[i] for i in indices), *spare], [0] * batch
    keys = jax.vmap(lambda s, i: jax.random.fold_in(jax.random.key(s), i))(
        jnp.array(seeds, jnp.uint32), jnp.array(streams, jnp.uint32)
    )
    stop_ids = np.full(-(-max(len(request.stop_ids), 1) // 8) * 8, -1, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    inputs = DecodeInputs(
        jnp.asarray(prompt),
        jnp.asarray(lengths),
        jnp.asarray(new),
        keys,
        jnp.asarray(stop_ids),
    )
    return inputs, bucket(max(map(len, rows)) + request.max_new_tokens)


class _Run:
    """A batch on its way through the two programs: start (prefill) and go on (loop)."""

    def __init__(self, model: Model, request: Plan, rows: list[list[int]], indices):
        self._model, self._request, self._rows = model, request, rows
        self._compile_seconds = self._decode_seconds = 0.0
        self._settings = traced_settings(request.settings)
        inputs, canvas_length = _batch_inputs(request, rows, indices)
        decoder = request.decoder

        def start(params, settings, inputs):
            return decoder.init(model.fns(params), settings, inputs, canvas_length)

        key = (decoder.name, "start", canvas_length)
        args = (model.params, self._settings, inputs)
        self.state: DecodeState = self._call(key, lambda: jax.jit(start), args)

    def _call(self, key: tuple, build: Callable[[], Callable], args: tuple) -> DecodeState:
        """Runs a program and books its time as compilation or decoding."""
        compiled, began = self._model.compile_seconds, time.perf_counter()
        state = self._model.run_program(key, build, args)
        jax.block_until_ready(state.done)
        compiled = self._model.compile_seconds - compiled
        self._compile_seconds += compiled
        self._decode_seconds += time.perf_counter() - began - compiled
        return state

    def advance(self, pause: bool) -> bool:
        """Goes on to the end, or to the next finished block; returns whether it ended."""
        model, decoder = self._model, self._request.decoder

        def go_on(state, params, settings, pause):
            fns = model.fns(params)
            step = functools.partial(decoder.step, fns, settings)
            return loop.run(step, state, pause)

        self.state = self._call(
            (decoder.name, "go_on"),
            lambda: jax.jit(go_on, donate_argnums=0),
            (self.state, model.params, self._settings, jnp.asarray(pause)),
        )
        return bool(jnp.all(self.state.done))

    def committed(self, row: int) -> list[int]:
        """The ids of a row that will not change, up to its first stop id."""
        canvas = np.asarray(self.state.canvas[row])
        begin, end = len(self._rows[row]), int(self.state.end[row])
        if not self.state.done[row]:
            end = min(end, int(self.state.cursor[row]))  # the open block may still change
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
        ended = np.isin(np.arange(len(self.state.done)), rows)
        self.state = self.state.replace(done=self.state.done | ended)

    def output(self, row: int) -> Output:
        """The finished row."""
        model, request = self._model, self._request
        tokens = self.committed(row)
        text = model.tokenizer.decode(tokens) if model.tokenizer else ""
        at_stop_id = len(tokens) < request.max_new_tokens
        reason = "eos" if at_stop_id else "length"
        generated = len(tokens) + at_stop_id
        cut = find_stop(text, request.stop)
        if cut is not None:
            # The fewest tokens whose text reaches the stop string.
            keep = next(
                n
                for n in range(len(tokens) + 1)
                if len(model.tokenizer.decode(tokens[:n])) >= cut
            )
            tokens, text, reason, generated = tokens[:keep], text[:cut], "stop", keep
        counts = jax.tree.map(lambda x: int(x[row]), vars(self.state.forwards))
        positions = counts.pop("positions")
        total = sum(counts.values())
        begin = len(self._rows[row])
        span = slice(begin, begin + len(tokens))
        return Output(
            tokens=tokens,
            text=text,
            finish_reason=reason,
            stats=Stats(
                prompt_tokens=begin,
                generated_tokens=generated,
                forwards={**counts, "total": total},
                positions=positions,
                tokens_per_forward=generated / max(total, 1),
                compile_seconds=round(self._compile_seconds, 4),
                decode_seconds=round(self._decode_seconds, 4),
            ),
            confidence=np.asarray(self.state.confidence[row, span]).tolist(),
            unmask_forward=np.asarray(self.state.unmask_forward[row, span]).tolist(),
        )


def _encode_all(model: Model, request: Plan, prompts: Sequence[Prompt]):
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.append(
                encode_prompt(
                    model.config,
                    model.tokenizer,
                    prompt,
                    request.chat,
                    request.max_new_tokens,
                )
            )
        except ValueError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    if request.stop and model.tokenizer is None:
        raise ValueError(f"stop={request.stop!r} needs a model with a tokenizer.")
    if not isinstance(request.seed, int) and len(request.seed) != len(rows):
        raise ValueError(f"{len(request.seed)} seeds were given for {len(rows)} prompts.")
    return rows


def run_plan(
    model: Model,
    request: Plan,
    prompts: Sequence[Prompt],
    batch_size: int | None = None,
) -> list[Output]:
    """Decodes prompts as `request` says; as `generate` after its settings are checked."""
    rows = _encode_all(model, request, prompts)
    size = batch_size or max(len(rows), 1)
    outputs: list[Output] = []
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        run = _Run(model, request, part, list(range(begin, begin + len(part))))
        if request.stop:
            # A stop string can only be seen in text, so look after every block.
            while not run.advance(pause=True):
                run.end_rows([row for row in range(len(part)) if run.has_stop(row)])
        else:
            run.advance(pause=False)
        outputs += [run.output(row) for row in range(len(part))]
    return outputs


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    decoder: str | None = None,
    *,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    chat: bool | None = None,
    preset: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    **settings: Any,
) -> list[Output]:
    """Decodes a batch of prompts; row i does not depend on the other rows.

    Args:
      model: from `load`.
      prompts: texts or lists of token ids.
      decoder: "block", "ar", ..., by default the preset's, else what the model is for.
      max_new_tokens: most tokens to generate for each prompt. Blocks are denoised whole,
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
        **settings,
    )
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"{batch_size=} must be a whole number of at least 1.")
    if not hasattr(prompts, "__len__"):
        raise ValueError(f"{prompts=} must be a text, a list of ids, or a list of them.")
    one = isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(p, int | np.integer) for p in prompts)
    )
    return run_plan(model, request, [prompts] if one else list(prompts), batch_size)


def stream_plan(
    model: Model, request: Plan, prompt: Prompt
) -> Iterator[tuple[str, Output | None]]:
    """Decodes one prompt block by block: pieces of text, then ("", the output)."""
    rows = _encode_all(model, request, [prompt])
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, so there is no text to stream.")
    run = _Run(model, request, rows, [0])
    text = TextStream(model.tokenizer, request.stop)
    ended = False
    while not ended and not text.stopped:
        ended = run.advance(pause=True)
        piece = text.push(run.committed(0), final=ended)
        if piece:
            yield piece, None
    yield "", run.output(0)


def stream(
    model: Model, prompt: Prompt, decoder: str | None = None, **arguments: Any
) -> Iterator[str]:
    """Decodes one prompt, yielding committed text block by block.

    Pieces never end inside a character and join to `generate`'s text. Arguments as
    `generate`, but for `batch_size`; wrong settings raise at once.
    """
    request = plan(model.config, decoder, **arguments)
    pieces = stream_plan(model, request, prompt)
    return (piece for piece, _ in pieces if piece)


__all__ = (
    "CheckpointError",
    "Model",
    "Output",
    "Plan",
    "Stats",
    "generate",
    "load",
    "load_config",
    "plan",
    "run_plan",
    "stream",
    "stream_plan",
)
