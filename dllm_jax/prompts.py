"""From prompts to rows of token ids: text, chat templates, ids, and texts with holes.

And the lengths that rows are padded to.
"""

import operator
import re
import reprlib
from collections.abc import Sequence
from typing import NamedTuple

from dllm_jax.config import ModelConfig
from dllm_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int]
MARKER = "[MASK]"


class Row(NamedTuple):
    """A row of a batch before it is decoded."""

    ids: list[int]  # the prompt; for infilling the whole text, with masks for its holes
    start: int  # first slot to fill
    end: int  # one past the last slot to fill
    shown: int  # first slot to return


def bucket(size: int) -> int:
    """The length that a program is compiled for: the next multiple of 64, 256 or 1024."""
    unit = 64 if size <= 1024 else 256 if size <= 8192 else 1024
    return -(-max(size, 1) // unit) * unit


def buckets_of(rows: Sequence[Row]) -> tuple[int, int]:
    """Slots of the prompts and of the canvas that rows need, in whole buckets."""
    return bucket(max(len(row.ids) for row in rows)), bucket(max(row.end for row in rows))


def encode_prompt(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    chat: bool | None,
    max_new_tokens: int,
) -> Row:
    """The row of a prompt that is to be continued; raises ValueError."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise _no_tokenizer()
        if chat and not tokenizer.has_chat_template:
            raise ValueError("chat=True, but the model has no chat template.")
        if chat or (chat is None and tokenizer.has_chat_template):
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
    else:
        ids = token_ids(config, prompt)
    if not ids:
        if config.bos_id is None:
            raise ValueError("the prompt is empty and the model has no BOS token.")
        ids = [config.bos_id]
    no_masks(config, ids)
    end = len(ids) + max_new_tokens
    if end > config.max_positions:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens} exceed "
            f"the model's {config.max_positions} positions."
        )
    return Row(ids, len(ids), end, len(ids))


def encode_holes(
    config: ModelConfig, tokenizer: Tokenizer | None, prompt: Prompt, marker: str
) -> Row:
    """The row of a prompt with holes; raises ValueError.

    Args:
      config: the model.
      tokenizer: for text.
      prompt: text with `marker` where a token is missing and, for `marker` "[MASK]",
        "[MASK:n]" where n are; or ids, the mask id where a token is missing.
      marker: at least two characters.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise _no_tokenizer()
        opening, closing = re.escape(marker[:-1]), re.escape(marker[-1])
        pieces = re.split(rf"{opening}(?::([0-9]{{1,6}}))?{closing}", prompt)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids += [config.mask_id] * int(piece or 1)
            elif piece or not index:
                ids += tokenizer.encode(piece, add_special_tokens=not index)
        what = f"with {marker} or {marker[:-1]}:n{marker[-1]}"
    else:
        ids = token_ids(config, prompt)
        what = f"with the mask id {config.mask_id}"
    if config.mask_id not in ids:
        raise ValueError(f"the prompt has no hole: mark missing tokens {what}.")
    if len(ids) > config.max_positions:
        raise ValueError(
            f"a text of {len(ids)} tokens exceeds the model's {config.max_positions} "
            "positions."
        )
    return Row(ids, ids.index(config.mask_id), len(ids), 0)


def _no_tokenizer() -> ValueError:
    return ValueError("the model has no tokenizer: give prompts as token ids.")


def token_ids(
    config: ModelConfig, tokens: Sequence[int], name: str = "prompt"
) -> list[int]:
    """Token ids inside the vocabulary; raises ValueError that says what `name` has."""
    try:
        ids = [operator.index(i) for i in tokens if not isinstance(i, bool)]
        whole = len(ids) == len(tokens)
    except TypeError:
        whole = False
    if not whole:
        shown = reprlib.repr(tokens).replace("\n", "")
        raise ValueError(f"{name} {shown} must be a text or a list of token ids.")
    bad = [i for i in ids if not 0 <= i < config.vocab_size]
    if bad:
        raise ValueError(
            f"token id {bad[0]} of the {name} is outside the vocabulary of "
            f"{config.vocab_size}."
        )
    return ids


def no_masks(config: ModelConfig, ids: list[int], name: str = "prompt") -> list[int]:
    """The same ids; raises ValueError if the mask id is among them."""
    if config.mask_id in ids:
        raise ValueError(
            f"token id {config.mask_id} is the mask token: a {name} must not contain it "
            "(infilling fills holes)."
        )
    return ids
