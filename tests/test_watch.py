"""Seeing it denoise: the canvas in a terminal, the page that plays it, the pictures."""

import concurrent.futures
import dataclasses
import html.parser
import io
import json
import os
import shutil
import signal
import subprocess

import jax
import matplotlib.figure
import pytest
from rich.console import Console
from rich.text import Text
from terminal import Terminal

import dllm_jax
from dllm_jax import plots, watch
from dllm_jax.decode import main
from dllm_jax.generate import watch_plan
from dllm_jax.request import plan, plan_infill
from dllm_jax.run import Output, Stats
from dllm_jax.terminal import shown, uninterrupted
from dllm_jax.trace_page import Cell, make_cells, trace_page

PROMPT = "Tom has 8 apples. He buys 5 more. He gives 3 to Ana. How many apples are left?"


@pytest.fixture(scope="module")
def model():
    return dllm_jax.load("demo")


@pytest.fixture(scope="module")
def output(model):
    return dllm_jax.generate(model, PROMPT, max_new_tokens=48)[0]


@pytest.fixture
def run(capsys, monkeypatch, model):
    """The command line on a loaded model, with a terminal for stderr if asked."""

    def call(*argv, terminal=False):
        monkeypatch.setenv("TERM", "xterm")
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr("dllm_jax.flags.load", lambda *args, **options: model)
        argv = ("--compile-cache", "none", "--prompt", PROMPT, *argv)
        code = main([*argv, "--max-new-tokens", "48"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    jax.config.update("jax_compilation_cache_dir", None)


# --- step by step ---------------------------------------------------------------------


def test_steps_give_the_same_tokens(model, output):
    request = plan(model.config, max_new_tokens=48)
    frames = list(watch_plan(model, request, PROMPT))
    last, watched = frames[-1]
    assert watched.to_dict()["tokens"] == output.tokens
    assert watched.unmask_forward == output.unmask_forward
    assert last[: len(output.tokens)] == output.tokens
    assert all(out is None for _, out in frames[:-1])
    # One canvas before the first forward, and one behind each; nothing is taken back.
    assert len(frames) == 1 + output.stats.forwards["denoise"]
    masks = [tokens.count(model.config.mask_id) for tokens, _ in frames]
    assert masks[0] == 48
    assert masks == sorted(masks, reverse=True)


def test_a_stop_string_ends_the_steps(model):
    request = plan(model.config, max_new_tokens=48, stop="=")
    *_, (_, watched) = watch_plan(model, request, PROMPT)
    [expected] = dllm_jax.generate(model, PROMPT, max_new_tokens=48, stop="=")
    assert (watched.text, watched.finish_reason) == (expected.text, "stop")


def test_holes_are_filled_in_place():
    llada = dllm_jax.load("demo-llada")
    text = "Ana has 12 [MASK:2]. She finds 7."
    frames = list(watch_plan(llada, plan_infill(llada.config), text))
    [expected] = dllm_jax.infill(llada, text)
    assert frames[-1][1].text == expected.text
    first, second = frames[0][0], frames[1][0]
    drawn, frontier = watch.draw(
        second, first, first, llada.tokenizer, llada.config.mask_id
    )
    assert drawn.plain[:frontier].startswith("Ana has 12")
    styles = {drawn.plain[span.start : span.end]: span.style for span in drawn.spans}
    assert styles["Ana"] == "bright_black"  # given
    assert drawn.plain.count("░") + list(styles.values()).count("bold green") == 2


def test_a_long_canvas_shows_the_lines_around_the_first_mask(model):
    ids = model.tokenizer.encode("\n".join(f"line {n}" for n in range(30)))
    canvas = [*ids, *[model.config.mask_id] * 9]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=8)
    frames = [(canvas, None), (canvas, "the output")]
    shown = watch.show(frames, model.tokenizer, model.config.mask_id, console, 0.0)
    assert shown == "the output"
    text = Text.from_ansi(file.getvalue()).plain
    assert "line 29" + "░" * 9 in text
    assert "line 3\n" not in text


def test_ctrl_c_leaves_the_text_so_far_and_a_clean_terminal(model, capsys):
    ids = model.tokenizer.encode("8+5=13")

    def frames():
        yield [*ids, model.config.mask_id, *ids], None
        raise KeyboardInterrupt

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=8)
    with pytest.raises(KeyboardInterrupt):
        watch.show(frames(), model.tokenizer, model.config.mask_id, console, 0.0)
    assert capsys.readouterr().out == "8+5=13\n"
    shows, hides = (file.getvalue().rfind(f"\x1b[?25{end}") for end in "hl")
    assert shows > hides  # the cursor


def test_watch_prints_the_text_on_stdout(run, output):
    code, out, err = run("--watch", "0", terminal=True)
    assert (code, out) == (0, output.text + "\n")
    assert "░" in err and "after step 3" in err
    assert err.rfind("\x1b[?25h") > err.rfind("\x1b[?25l")


@pytest.mark.parametrize(
    ("argv", "terminal", "words"),
    [
        (["--watch"], False, ["watch=0.2", "terminal"]),
        (["--watch", "-1"], True, ["watch=-1.0"]),
        (["--watch", "--stream"], True, ["watch=0.2", "--stream"]),
        (["--watch", "--prompt", "b"], True, ["one prompt"]),
        (["--trace-out", "nowhere/a.html"], False, ["trace_out='nowhere/a.html'"]),
        (["--trace-out", "a", "--trace-png", "./a"], False, ["trace_png", "trace_out too"]),
    ],
)
def test_mistakes(run, argv, terminal, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*argv, terminal=terminal)
    last = err.splitlines()[-1]
    assert code == 2
    for word in words:
        assert word in last


@pytest.mark.parametrize("flag", ["--watch=0", "--trace-out=a.html", "--trace-png=a.png"])
def test_files_of_prompts_take_no_pictures(flag, capsys):
    assert main(["--input", "in.jsonl", "--output", "out.jsonl", flag]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert flag[2:7].replace("-", "_") in last and "--input" in last


def test_ctrl_c_in_a_stream_keeps_what_was_printed(run, output, monkeypatch):
    def interrupted(*args):
        yield output.text[:9], None
        raise KeyboardInterrupt

    monkeypatch.setattr("dllm_jax.decode.stream_plan", interrupted)
    code, out, err = run("--stream")
    assert (code, out) == (1, output.text[:9] + "\n")
    assert err.splitlines()[-1] == "decode: interrupted"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals")
def test_ctrl_c_while_it_compiles_leaves_a_clean_terminal():
    argv = ("dllm_jax.decode", "--prompt", PROMPT, "--compile-cache=none", "--no-stream")
    with Terminal(*argv) as terminal:
        terminal.wait_for(r"loaded in .*\n")
        terminal.ctrl_c()
        assert terminal.end() == 1
        assert terminal.shown.rstrip().endswith("decode: interrupted")
        assert "Traceback" not in terminal.shown
        assert terminal.is_clean


@pytest.mark.parametrize("when", ["start", "shown", "stop"])
def test_an_interrupt_leaves_no_display_half_begun(when):
    said = []

    class Display:
        def start(self):
            self._do("start")

        def stop(self):
            self._do("stop")

        def _do(self, name):
            if name == when:
                signal.raise_signal(signal.SIGINT)
            said.append(name)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), shown(Display()):
        said.append("shown")
        if when == "shown":
            signal.raise_signal(signal.SIGINT)
    assert said == ["start", *["shown"] * (when != "start"), "stop"]
    assert signal.getsignal(signal.SIGINT) is before


def test_displays_of_other_threads_are_shown():
    said = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: said.append(list(_uninterrupted()))).result()
    assert said == [["inside"]]


def _uninterrupted():
    with uninterrupted():
        yield "inside"


# --- files ----------------------------------------------------------------------------


def fake_output(tokens, forwards, confidence):
    stats = Stats(1, len(tokens), {"total": 3}, 9, 1.0, "exact", 0.0, 0.0)
    return Output(tokens, "", "eos", stats, confidence, forwards)


class Page(html.parser.HTMLParser):
    """The texts of a page's spans by class, and everything it refers to."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.links, self.scripts, self._open = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [v for k, v in attrs.items() if k in ("src", "href", "srcset")]
        if tag not in ("meta", "input", "br"):
            self._open.append(tag if tag == "script" else attrs.get("class", tag))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def test_files_are_written_whole(run, output, tmp_path):
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    code, _, _ = run("--trace-out", str(page), "--trace-png", str(picture))
    assert code == 0
    parsed = Page(page.read_text(encoding="utf-8"))
    assert "".join(parsed.texts["t"]) == output.text
    assert parsed.texts["given"][0] == PROMPT
    assert parsed.links == []
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.png"]
    code, _, err = run("--trace-out", str(page))
    assert code == 2
    assert "trace_out=" in err and "exists" in err


def test_a_page_escapes_and_shows_labels():
    nasty = "</script><b>&\"'\x1b"
    cells = [
        Cell("given ", -1, 1.0),
        Cell(nasty, 0, 0.25, "rule <i>"),
        Cell("@SECTIONS@", 2, 1.0, "verify"),
    ]
    text = trace_page([("<p> prompt", cells)], settings=["decoder=<1>", "a=<2>"])
    page = Page(text)
    assert page.texts["t"] == [nasty.replace("\x1b", "\ufffd"), "@SECTIONS@"]
    assert page.texts["given"] == ["<p> prompt", "given "]
    assert page.texts["label"] == ["rule <i>", "verify"]
    assert page.links == [] and "http" not in text and len(page.scripts) == 1
    assert 'max="3"' in text
    assert "forward 1, confidence 0.250, rule &lt;i&gt;" in text


def test_cells_without_a_tokenizer_are_ids():
    cells = make_cells(fake_output([5, 7], [-1, 1], [1.0, 0.5]), labels=["", "x"])
    assert cells == [Cell("5 ", -1, 1.0), Cell("7 ", 1, 0.5, "x")]


def test_cells_have_the_rules_of_a_trace(model):
    [out] = dllm_jax.generate(model, PROMPT, max_new_tokens=48, trace=True)
    cells = make_cells(out, model.tokenizer)
    by_slot = {record["slot"]: record for record in out.trace}
    for index, cell in enumerate(cells):
        record = by_slot[out.stats.prompt_tokens + index]
        assert (cell.label, cell.forward) == (record["rule"], record["forward"])
    assert {cell.label for cell in cells} == {"low_confidence_dynamic"}
    given = dataclasses.replace(fake_output([5, 7], [-1, 1], [1.0, 0.5]), trace=out.trace)
    assert [cell.label for cell in make_cells(given)] == ["", out.trace[0]["rule"]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_plays():
    """Its script on the least of a browser."""
    cells = [Cell("a", 0, 1.0), Cell("b", 1, 1.0), Cell("c", 0, 1.0)]
    script = "".join(Page(trace_page([("", cells)])).scripts)
    browser = """
    const element = (data) => ({dataset: data, names: new Set(), classList: {}, value: "2",
      max: "2", click() { this.onclick(); }});
    const found = {at: element(), play: element(), count: element()};
    const spans = ["0", "1", "0"].map((f) => element({f}));
    for (const t of spans) t.classList.toggle = (name, on) =>
      on ? t.names.add(name) : t.names.delete(name);
    const document = {getElementById: (id) => found[id], querySelectorAll: () => spans};
    const matchMedia = () => ({matches: false}), log = [];
    const look = () => log.push(spans.map((t) => [...t.names].join("+")));
    let tick = null;
    const setInterval = (f) => { tick = f; return 1; };
    const clearInterval = () => { tick = null; };
    """
    play = "look(); while (tick) { tick(); look(); } console.log(JSON.stringify(log));"
    result = subprocess.run(
        ["node", "-e", browser + script + play], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [
        ["masked", "masked", "masked"],
        ["new", "masked", "new"],
        ["", "", ""],
    ]


# --- pictures -------------------------------------------------------------------------


@pytest.fixture
def axes():
    return matplotlib.figure.Figure().subplots()


def test_order_map_has_every_token(axes, model):
    ids = model.tokenizer.encode("5$ 7$")
    out = fake_output(ids, [-1, *range(len(ids) - 1)], [1.0] * len(ids))
    plots.order_map(out, model.tokenizer, axes=axes)
    assert len(axes.patches) == len(ids)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("$") == 2
    assert "1" in texts and str(len(ids) - 1) in texts
    axes.figure.savefig(io.BytesIO())  # dollars are no formulas


def test_confidence_over_forwards(axes):
    outputs = {"one": fake_output([5, 7, 8], [-1, 1, 1], [1.0, 0.5, 1.0])}
    plots.confidence_over_forwards(outputs, axes=axes)
    [line] = axes.lines
    assert [list(map(float, values)) for values in line.get_data()] == [[2.0], [0.75]]
    assert line.get_label() == "one"


def test_frontier(axes):
    points = [("a", 1.0, 90.0), ("a", 3.0, 80.0), ("b", 2.0, 85.0), ("b", 2.0, 70.0)]
    rows = [{"strategy": s, "tokens/forward": x, "accuracy %": y} for s, x, y in points]
    plots.frontier(rows, axes=axes)
    best = list(zip(*axes.lines[-1].get_data(), strict=True))
    assert best == [(1.0, 90.0), (2.0, 85.0), (3.0, 80.0)]
    assert plots.unbeaten([(1, 1), (1, 2), (2, 2)]) == [(2, 2)]
    with pytest.raises(ValueError, match="no 'speed'"):
        plots.frontier(rows, speed="speed", axes=axes)


def test_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    code, _, err = run("--trace-png", str(tmp_path / "a.png"))
    assert code == 2
    last = err.splitlines()[-1]
    assert "trace_png=" in last and "pip install matplotlib" in last
