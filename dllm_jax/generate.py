"""The library's front door: `generate`, `infill`, `stream`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dllm_jax.model import Model, check_loaded
from dllm_jax.prompts import MARKER, Prompt, Row, encode_holes, encode_prompt
from dllm_jax.request import Plan, check_drafter, plan, plan_infill
from dllm_jax.run import Output, Run
from dllm_jax.tokenizer import TextStream


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


def check_models(model: Model, request: Plan, drafter: Model | None) -> None:
    """`check_drafter` for loaded models, which must be on one mesh."""
    check_loaded(drafter, "draft_model")
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
        outputs += run.outputs(range(len(part)))
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
    logprobs: str | None = None,
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
      logprobs: what each `Output.logprobs` has for every token, in nats: "commit", of the
        forward that unmasked it (the log of `Output.confidence`, which block decoders take
        after the temperature, those of bidirectional models before it); "rescored", of the
        finished text, as `token_log_probs` (more forwards, which no count includes);
        "both"; None.
      **settings: the decoder's settings, by name or alias.

    Returns:
      One `Output` a prompt, in order.

    Raises:
      ValueError: for a wrong setting or prompt, in one line.
    """
    check_loaded(model)
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
        logprobs=logprobs,
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
    logprobs: str | None = None,
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
      logprobs: as `generate`; 0 for given tokens.
      **settings: the decoder's settings, by name or alias.

    Returns:
      One `Output` a prompt, of the whole completed text.

    Raises:
      ValueError: for a wrong setting or prompt, in one line.
    """
    check_loaded(model)
    given = {"marker": marker, "seed": seed, "preset": preset}
    given |= {"trace": trace, "logprobs": logprobs}
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
    yield "", run.outputs([0])[0]


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
    yield run.canvas(0), run.outputs([0])[0]


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
    check_loaded(model)
    request = plan(model.config, decoder, **arguments)
    check_models(model, request, draft_model)
    pieces = stream_plan(model, request, prompt, draft_model)
    return (piece for piece, _ in pieces if piece)
