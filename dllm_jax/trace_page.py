"""One self-contained web page that plays a denoising, token by token."""

import dataclasses
import html
import re
from collections.abc import Sequence

from dllm_jax.run import Output
from dllm_jax.tokenizer import Tokenizer, token_pieces

_UNSURE, _SURE = (0xF2, 0xB1, 0x5C), (0x6F, 0xC7, 0xB8)
_LABEL_COLOURS = ("#4059ad", "#b3446c", "#5b7f2b", "#8a5a00", "#7a4fa3", "#00707a")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A token as it is shown."""

    text: str
    forward: int  # the one that unmasked it, from 0; below 0: it was given
    confidence: float
    label: str = ""  # what decided it, such as a rule's name; "" if that is not known


def make_cells(
    output: Output, tokenizer: Tokenizer | None = None, labels: Sequence[str] | None = None
) -> list[Cell]:
    """The tokens of an output as they are shown.

    Args:
      output: of `generate` or `infill`.
      tokenizer: the model's; ids are shown if there is none.
      labels: what decided each token; the rules of the output's trace if it has one.
    """
    if tokenizer is None:
        texts = [f"{token} " for token in output.tokens]
    else:
        texts = token_pieces(tokenizer, output.tokens)
    if labels is None:
        # Records are of unmasked slots, in their order, as the output's tokens are.
        rules = iter([record["rule"] for record in output.trace or ()])
        labels = [next(rules, "") if n >= 0 else "" for n in output.unmask_forward]
    columns = (texts, output.unmask_forward, output.confidence, labels)
    return [Cell(*values) for values in zip(*columns, strict=True)]


def _escape(text: str) -> str:
    return html.escape(_CONTROL.sub("\ufffd", text))


def _colour(confidence: float) -> str:
    share = min(max(confidence, 0.0), 1.0) ** 3  # most are near 1: spread them
    mixed = (round(a + (b - a) * share) for a, b in zip(_UNSURE, _SURE, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _span(cell: Cell, colours: dict[str, str]) -> str:
    if cell.forward < 0:
        return f'<span class="given" title="given">{_escape(cell.text)}</span>'
    about = f"forward {cell.forward + 1}, confidence {cell.confidence:.3f}"
    style = f"--c:{_colour(cell.confidence)}"
    if cell.label:
        about += f", {cell.label}"
        style += f";--l:{colours[cell.label]}"
    return (
        f'<span class="t" data-f="{cell.forward}" style="{style}" '
        f'title="{_escape(about)}">{_escape(cell.text)}</span>'
    )


def _about(settings: Sequence[str]) -> str:
    if not settings:
        return ""
    first, *rest = map(_escape, settings)
    return f'<details class="small"><summary>{first}</summary>{" ".join(rest)}</details>'


def trace_page(
    traces: Sequence[tuple[str, Sequence[Cell]]],
    settings: Sequence[str] = (),
    title: str = "dllm_jax",
) -> str:
    """The page's HTML. It needs no other file; without scripts it shows the final text.

    Args:
      traces: prompt and cells of each output.
      settings: the first is shown, the others when it is opened.
      title: of the page.
    """
    cells = [cell for _, row in traces for cell in row]
    last = max((cell.forward + 1 for cell in cells), default=0)
    names = list(dict.fromkeys(cell.label for cell in cells if cell.label))
    colours = {
        name: _LABEL_COLOURS[i % len(_LABEL_COLOURS)] for i, name in enumerate(names)
    }
    legend = "".join(
        f'<span class="label" style="--l:{colours[name]}">{_escape(name)}</span> '
        for name in names
    )
    sections = "\n".join(
        f'<section><p class="given">{_escape(prompt)}</p>\n<p class="canvas">'
        f"{''.join(_span(cell, colours) for cell in row)}</p></section>"
        for prompt, row in traces
    )
    values = {
        "TITLE": _escape(title),
        "ABOUT": _about(settings),
        "LAST": str(last),
        "LEGEND": legend,
        "UNSURE": _colour(0.0),
        "SURE": _colour(1.0),
        "SECTIONS": sections,
    }
    # In one pass: what is put in may hold a name itself.
    return re.sub(r"@([A-Z]+)@", lambda found: values[found.group(1)], _PAGE)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>@TITLE@</title>
<style>
body { font: 16px/1.7 system-ui, sans-serif; max-width: 60em; margin: 2em auto;
  padding: 0 1em; color: #222; background: #fff; }
h1 { font-size: 1.2em; } .small { font-size: .8em; color: #666; }
.given { color: #888; white-space: pre-wrap; }
.canvas { white-space: pre-wrap; }
.t { background: var(--c); border-radius: 3px; margin-right: 1px; padding: 1px 0; }
.t[style*="--l"], .label { border-bottom: 3px solid var(--l); }
.t.masked { background: #ddd; color: transparent; border-color: transparent; }
.t.new { outline: 2px solid #222; }
.bar { display: inline-block; width: 8em; height: .8em; border-radius: 3px;
  background: linear-gradient(to right, @UNSURE@, @SURE@); }
nav { position: sticky; top: 0; background: #fff; padding: .5em 0; }
nav input { width: 50%; vertical-align: middle; }
section { border-top: 1px solid #ddd; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@ABOUT@
<nav><button id="play" type="button">Play</button>
<input id="at" type="range" min="0" max="@LAST@" value="@LAST@" aria-label="forward">
<output id="count">after forward @LAST@ of @LAST@</output></nav>
<p class="small">unsure <span class="bar"></span> sure; grey: masked; grey text: given.
@LEGEND@</p>
@SECTIONS@
<script>
const at = document.getElementById("at"), play = document.getElementById("play");
const tokens = [...document.querySelectorAll(".t")], last = Number(at.max);
let timer = null;
function show(n) {
  for (const token of tokens) {
    const forward = Number(token.dataset.f);
    token.classList.toggle("masked", forward >= n);
    token.classList.toggle("new", forward === n - 1 && n < last);
  }
  at.value = n;
  document.getElementById("count").textContent = `after forward ${n} of ${last}`;
}
function stop() { clearInterval(timer); timer = null; play.textContent = "Play"; }
play.onclick = () => {
  if (timer !== null) return stop();
  if (Number(at.value) >= last) show(0);
  play.textContent = "Pause";
  timer = setInterval(() => {
    show(Number(at.value) + 1);
    if (Number(at.value) >= last) stop();
  }, Math.max(60, Math.min(600, 12000 / Math.max(last, 1))));
};
at.oninput = () => { stop(); show(Number(at.value)); };
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play.click();
</script>
</body>
</html>
"""
