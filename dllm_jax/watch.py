"""A canvas that fills in place in a terminal."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dllm_jax.run import Output
from dllm_jax.terminal import shown
from dllm_jax.tokenizer import Tokenizer, token_pieces

_MASK = "░"


def _runs(tokens: Sequence[int], mask_id: int) -> Iterator[tuple[bool, list[int]]]:
    """Maximal runs of masked or of decided slots, as their indices."""
    by_kind = groupby(range(len(tokens)), key=lambda i: tokens[i] == mask_id)
    for is_mask, indices in by_kind:
        yield is_mask, list(indices)


def draw(
    tokens: Sequence[int],
    before: Sequence[int],
    first: Sequence[int],
    tokenizer: Tokenizer,
    mask_id: int,
) -> tuple[Text, int]:
    """A canvas as text, and where its first mask is.

    What has changed since the canvas `before` is bright, what was there in the `first` one
    grey.
    """
    text, frontier = Text(), None
    for is_mask, indices in _runs(tokens, mask_id):
        if is_mask:
            frontier = len(text) if frontier is None else frontier
            text.append(_MASK * len(indices), style="dim")
            continue
        pieces = token_pieces(tokenizer, [tokens[i] for i in indices])
        for index, piece in zip(indices, pieces, strict=True):
            new = tokens[index] != before[index]
            given = first[index] == tokens[index]
            text.append(
                piece, style="bold green" if new else "bright_black" if given else ""
            )
    return text, len(text) if frontier is None else frontier


def _crop(text: Text, frontier: int, console: Console) -> Text:
    """The lines around the first mask, as many as the terminal shows."""
    height = max(console.height - 2, 1)
    lines = text.wrap(console, console.width)
    if len(lines) <= height:
        return text
    seen = text[:frontier].wrap(console, console.width)
    begin = min(max(len(seen) - height // 2, 0), len(lines) - height)
    return Text("\n").join(lines[begin : begin + height])


def show(
    frames: Iterable[tuple[list[int], Output | None]],
    tokenizer: Tokenizer,
    mask_id: int,
    console: Console,
    seconds: float,
) -> Output:
    """Shows the frames of `watch_plan` in place; gives the output.

    Interrupted, it prints on stdout what was decided before the first mask.

    Args:
      frames: canvases, the last with the output.
      tokenizer: the model's.
      mask_id: the model's.
      console: of a terminal; it is left as it was.
      seconds: least time that a frame is shown.
    """
    first: list[int] = []
    before: list[int] = []
    output: Output | None = None
    try:
        live = Live(console=console, auto_refresh=False, transient=True)
        with shown(live):
            for number, (tokens, last) in enumerate(frames):
                shown_at, output = time.monotonic(), last
                first, before = first or tokens, before or tokens
                text, frontier = draw(tokens, before, first, tokenizer, mask_id)
                head = Text.assemble((f"after step {number}\n", "dim"))
                live.update(head + _crop(text, frontier, console), refresh=True)
                before = tokens
                time.sleep(max(seconds - (time.monotonic() - shown_at), 0.0))
    except KeyboardInterrupt:
        decided = before[: before.index(mask_id)] if mask_id in before else before
        print(tokenizer.decode(decided), flush=True)
        raise
    assert output is not None
    return output
