"""Text in and out: encoding that cannot produce the mask token, decoding for streams."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BROKEN = "\ufffd"


class Tokenizer:
    """A checkpoint's tokenizer, with its chat template if it has one."""

    def __init__(self, directory: Path, mask_id: int):
        """Loads the tokenizer's files; nothing of the checkpoint's code is run.

        Raises:
          ValueError: if the directory has no tokenizer that `transformers` reads.
        """
        # Said once at import, of no use to people who run JAX.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # tokenizer.json says everything; other layouts need the class behind them.
        whole = (directory / "tokenizer.json").exists()
        kind = PreTrainedTokenizerFast if whole else AutoTokenizer
        try:
            self._hf = kind.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever the files make transformers raise
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{directory} has no readable tokenizer: {line}") from None
        texts = {self._hf.convert_ids_to_tokens(mask_id), self._hf.mask_token}
        self._mask_texts = sorted(
            {t for t in texts if t and self._hf.convert_tokens_to_ids(t) == mask_id}
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how to lay out a conversation."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        The mask token's text is encoded as ordinary characters: a prompt must not have
        holes by accident.

        Raises:
          ValueError: if the text has half a surrogate pair, as of bytes that are no UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a character at {error.start}: it was not UTF-8."
            ) from None
        pieces = [text]
        for mask_text in self._mask_texts:
            # Cut behind the first character of each occurrence: no piece contains it.
            pieces = [part for piece in pieces for part in _cut_inside(piece, mask_text)]
        ids = []
        for index, piece in enumerate(pieces):
            special = add_special_tokens and index == 0
            ids += self._hf.encode(piece, add_special_tokens=special)
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that ends where the assistant is to speak.

        Args:
          messages: `{"role": .., "content": ..}` each.

        Raises:
          ValueError: if the template does not take them, such as a system prompt.
        """
        from jinja2 import TemplateError

        try:
            text: Any = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(
                f"the model's chat template does not take this conversation: {error}"
            ) from None
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._hf.decode(list(ids), skip_special_tokens=True)


def _cut_inside(text: str, needle: str) -> list[str]:
    parts = text.split(needle)
    out = [parts[0]]
    for part in parts[1:]:
        out[-1] += needle[:1]
        out.append(needle[1:] + part)
    return out


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; the pieces join to the text of all.

    A character of several tokens belongs to the last of them.
    """
    pieces = []
    # Tokenizers look at what precedes a token: each is decoded with those before it, from
    # the last place where a character was complete, and one more such place.
    begin = done = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[begin:done])
        text = tokenizer.decode(ids[begin:end])
        if text.endswith(_BROKEN) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        begin, done = done, end
    return pieces


class TextStream:
    """Turns a growing list of committed ids into pieces of text.

    A piece never ends inside a character, and what might become a stop string is held
    back until it is decided. The pieces join to the final text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._sent = ""
        self.stopped = False

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """The new text, given all committed ids so far."""
        text = self._tokenizer.decode(ids)
        cut = find_stop(text, self._stop)
        if cut is not None:
            text, self.stopped = text[:cut], True
        elif not final:
            text = text.rstrip(_BROKEN)
            held = max(
                (
                    size
                    for stop in self._stop
                    for size in range(1, len(stop))
                    if text.endswith(stop[:size])
                ),
                default=0,
            )
            text = text[: len(text) - held]
        if not text.startswith(self._sent):
            return ""
        piece, self._sent = text[len(self._sent) :], text
        return piece


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins in `text`, or None."""
    found = [index for s in stop if (index := text.find(s)) >= 0]
    return min(found, default=None)
