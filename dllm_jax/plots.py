"""Pictures for notebooks: unmasking order, confidence, accuracy against speed.

Each draws on `axes`, or on a new figure's, and returns them. matplotlib is imported when
it is needed (the `eval` extra).
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from dllm_jax.run import Output
from dllm_jax.tokenizer import Tokenizer
from dllm_jax.trace_page import make_cells


def check_matplotlib() -> None:
    """Raises ValueError, in one line, if matplotlib is not there."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install matplotlib.")


def _new_axes(width: float, height: float) -> Any:
    check_matplotlib()
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def order_map(
    output: Output,
    tokenizer: Tokenizer | None = None,
    *,
    columns: int = 16,
    title: str | None = None,
    axes: Any = None,
) -> Any:
    """Every token in its place; number and colour say which forward unmasked it.

    Args:
      output: of `generate` or `infill`; given tokens are grey.
      tokenizer: the model's; ids are shown if there is none.
      columns: tokens a line.
      title: above the picture; by default how many tokens came in how many forwards.
      axes: where to draw.
    """
    cells = make_cells(output, tokenizer)
    rows = -(-max(len(cells), 1) // columns)
    axes = _new_axes(0.75 * columns, 0.55 * rows + 0.4) if axes is None else axes
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    most = max((cell.forward for cell in cells), default=0)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        shade = max(cell.forward, 0) / max(most, 1)
        face = "lightgrey" if cell.forward < 0 else colormaps["viridis"](shade)
        ink = "black" if shade > 0.6 or cell.forward < 0 else "white"
        axes.add_patch(Rectangle((column, -row), 1, -1, color=face, ec="white", lw=1.5))
        centre = {"ha": "center", "va": "center", "color": ink, "parse_math": False}
        axes.text(column + 0.5, -row - 0.42, cell.text.strip() or "␣", **centre)
        if cell.forward >= 0:
            corner = {"ha": "right", "color": ink, "fontsize": 6}
            axes.text(column + 0.93, -row - 0.88, str(cell.forward + 1), **corner)
    axes.set_xlim(0, columns)
    axes.set_ylim(-rows, 0)
    if title is None:
        stats = output.stats
        title = f"{stats.generated_tokens} tokens in {stats.forwards['total']} forwards"
    axes.set_title(title, loc="left", fontsize=10)
    axes.axis("off")
    return axes


def order_maps(outputs: Sequence[Output], tokenizer: Tokenizer | None = None) -> Any:
    """A matplotlib figure with the order map of each output, for a file."""
    check_matplotlib()
    from matplotlib.figure import Figure

    rows = [-(-max(len(output.tokens), 1) // 16) for output in outputs]
    size = (12.0, sum(0.55 * count + 0.4 for count in rows))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(len(outputs), 1, squeeze=False, height_ratios=rows)
    for axes, output in zip(all_axes[:, 0], outputs, strict=True):
        order_map(output, tokenizer, axes=axes)
    return figure


def confidence_over_forwards(
    outputs: Output | Sequence[Output] | Mapping[str, Output], *, axes: Any = None
) -> Any:
    """How sure the model was of each token when it was unmasked, forward by forward.

    Points are tokens, the line is the mean of a forward. A mapping gives each output its
    name in the legend.
    """
    axes = _new_axes(7.0, 3.5) if axes is None else axes
    if isinstance(outputs, Output):
        outputs = [outputs]
    named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
    for name, output in named.items():
        by_forward: dict[int, list[float]] = {}
        for number, value in zip(output.unmask_forward, output.confidence, strict=True):
            if number >= 0:
                by_forward.setdefault(number + 1, []).append(value)
        points = [(n, value) for n, values in by_forward.items() for value in values]
        means = [(n, sum(v) / len(v)) for n, v in sorted(by_forward.items())]
        label = str(name) if isinstance(outputs, Mapping) else None
        [line] = axes.plot(*_columns(means), lw=1.2, label=label)
        axes.scatter(*_columns(points), s=14, alpha=0.6, color=line.get_color())
    axes.set_xlabel("forward")
    axes.set_ylabel("confidence")
    axes.set_ylim(0.0, 1.05)
    if isinstance(outputs, Mapping):
        axes.legend(frameon=False)
    return axes


def frontier(
    rows: Sequence[Mapping[str, Any]],
    *,
    speed: str = "tokens/forward",
    quality: str = "accuracy %",
    series: str = "strategy",
    axes: Any = None,
) -> Any:
    """Quality against speed, and the settings that no other beats in both (dashed).

    Args:
      rows: as the benchmarks write them: a dict a setting.
      speed: the key of the horizontal axis, more is better.
      quality: the key of the vertical axis, more is better.
      series: the key whose values have a colour each.
      axes: where to draw.
    """
    for key in (speed, quality, series):
        missing = next((row for row in rows if key not in row), None)
        if missing is not None:
            raise ValueError(f"a row has no {key!r}; it has {', '.join(missing)}.")
    axes = _new_axes(7.0, 4.0) if axes is None else axes
    for name in dict.fromkeys(row[series] for row in rows):
        points = sorted((row[speed], row[quality]) for row in rows if row[series] == name)
        axes.plot(*_columns(points), "o-", lw=0.8, ms=5, label=str(name))
    best = unbeaten([(row[speed], row[quality]) for row in rows])
    axes.plot(*_columns(best), "k--", lw=1.0, zorder=0)
    axes.set_xlabel(speed)
    axes.set_ylabel(quality)
    axes.legend(frameon=False, fontsize=8)
    return axes


def unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point equals or beats in both coordinates, by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
