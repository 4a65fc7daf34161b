"""Files of prompts: order, refilled rows, bad lines, kills, and what resume refuses."""

import json

import numpy as np
import pytest

from dllm_jax import batch, generate, load
from dllm_jax.decode import main
from dllm_jax.request import plan

_MORE = {"max_new_tokens": 10, "block_length": 4, "temperature": 0.7, "threshold": 0.5}


@pytest.fixture(scope="module")
def model(golden_dir):
    return load(str(golden_dir / "sdar"), dtype="float32")


def prompts_of(count: int, longest: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 200, rng.integers(1, longest)).tolist() for _ in range(count)]


def write(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_records(path, other):
    """Line by line; confidences may differ in their last bits from batch to batch."""
    for one, two in zip(records_of(path), records_of(other), strict=True):
        confidence = one.pop("confidence", []), two.pop("confidence", [])
        np.testing.assert_allclose(*confidence, atol=1e-5)
        assert one == two


@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
def test_a_file_is_what_its_prompts_are_alone(golden_dir, model, tmp_path, mesh):
    """In order, although rows are refilled and lengths mixed; one program a bucket."""
    if mesh:
        model = load(str(golden_dir / "sdar"), dtype="float32", mesh=mesh)
    prompts = prompts_of(21)
    source = write(tmp_path / "in.jsonl", prompts)
    request = plan(model.config, "block", seed=3, **_MORE)
    lines = batch.read_lines(source, request, "sdar")
    before, seen = model.num_traces, []
    bad = batch.decode_file(
        *(model, request, lines, tmp_path / "out.jsonl"),
        batch_size=4,
        finished=lambda number, output: seen.append(number),
    )
    assert bad == [] and sorted(seen) == list(range(1, 22))
    # Two buckets of canvases, two of prompts at most; each starts, goes on, and refills.
    assert model.num_traces - before <= 3 * 3
    got = records_of(tmp_path / "out.jsonl")
    assert [record["line"] for record in got] == list(range(1, 22))
    assert not {"compile_seconds", "decode_seconds"} & got[0]["stats"].keys()
    want = generate(model, prompts, "block", seed=3, batch_size=7, **_MORE)
    for record, out in zip(got, want, strict=True):
        assert record["tokens"] == out.tokens
        assert record["unmask_forward"] == out.unmask_forward
        assert record["stats"]["forwards"] == out.stats.forwards


def test_bad_lines_are_named_and_stop_nothing(golden_dir, model, tmp_path, capsys):
    lines = [
        b"[1, 2, 3]",
        b"not json",
        b"",
        b'{"prompt": [4, 5], "id": {"deep": 1}}',
        b'{"prompt": [999999]}',
        b'{"text": [1], "id": 6}',
        b'"\xff"',
        b'"a text"',
        b"[1.5]",
        b"[" * 100_000,
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    arguments = ["--model", str(golden_dir / "sdar"), "--dtype", "float32", "--quiet"]
    arguments += ["--compile-cache", "none", "--max-new-tokens", "4"]
    arguments += ["--input", str(source), "--output", str(out)]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    records = {record["line"]: record for record in records_of(out)}
    assert list(records) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert records[4]["id"] == {"deep": 1} and len(records[4]["tokens"]) <= 4
    assert records[6]["id"] == 6
    words = {2: "not JSON", 5: "999999", 6: "'text'", 7: "UTF-8", 8: "tokenizer"}
    words |= {9: "list of token ids", 10: "JSON"}
    for number, word in words.items():
        assert word in records[number]["error"]
        assert f"line {number}: {records[number]['error']}" in error
    assert error.count("\n") == len(words)


def test_a_killed_run_goes_on(model, tmp_path, monkeypatch):
    """It loses what was being decoded, repeats nothing, and ends as a whole one."""
    prompts = prompts_of(12, 30)
    source, out = write(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"
    request = plan(model.config, "block", **_MORE)
    lines = batch.read_lines(source, request, "sdar")
    batch.decode_file(model, request, lines, tmp_path / "whole.jsonl", batch_size=4)

    class Killed(BaseException):
        pass

    def finished(number, output):
        if len(out.read_text().splitlines()) == 5:
            raise Killed

    with pytest.raises(Killed):
        batch.decode_file(model, request, lines, out, batch_size=4, finished=finished)
    kept = records_of(out)
    assert len(kept) == 5
    with out.open("a") as file:  # a line that the kill has cut off
        file.write('{"line": 12, "to')
    decoded = []
    batch.decode_file(
        *(model, request, lines, out),
        batch_size=4,
        resume=True,
        finished=lambda number, output: decoded.append((number, output)),
    )
    same_records(out, tmp_path / "whole.jsonl")
    again = {number for number, output in decoded if output is not None}
    assert again == {line.number for line in lines} - {record["line"] for record in kept}
    # Nothing is left to do.
    batch.decode_file(model, request, lines, out, resume=True)
    same_records(out, tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob(".*partial"))


def test_resume_is_of_the_same_run(model, tmp_path):
    source, out = write(tmp_path / "in.jsonl", [[1, 2], [3]]), tmp_path / "out.jsonl"
    request = plan(model.config, "block", **_MORE)
    lines = batch.read_lines(source, request, "sdar")
    batch.decode_file(model, request, lines, out)
    other = plan(model.config, "block", seed=1, **_MORE)
    before = out.read_bytes()
    for changed in (
        batch.read_lines(source, other, "sdar"),
        batch.read_lines(source, request, "another model"),
        batch.read_lines(write(tmp_path / "b.jsonl", [[1, 2], [4]]), request, "sdar"),
    ):
        with pytest.raises(ValueError, match="another prompt, model or setting"):
            batch.decode_file(model, request, changed, out, resume=True)
    out.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is not of a run of this program"):
        batch.decode_file(model, request, lines, out, resume=True)
    with pytest.raises(ValueError, match="File exists"):
        batch.decode_file(model, request, lines, out)
    assert before and out.read_text() == "{}\n"


def test_stop_strings_end_rows_of_a_file(tmp_path):
    demo = load("demo")
    questions = ["Tom has 12 pens. He buys 4 more.", "Ana has 5 eggs. She finds 9."]
    source = write(tmp_path / "in.jsonl", questions * 3)
    request = plan(demo.config, max_new_tokens=40, stop=["."])
    lines = batch.read_lines(source, request, "demo")
    batch.decode_file(demo, request, lines, tmp_path / "out.jsonl", batch_size=2)
    want = generate(demo, questions, max_new_tokens=40, stop=["."])
    for record, out in zip(records_of(tmp_path / "out.jsonl"), want * 3, strict=True):
        assert (record["text"], record["finish_reason"]) == (out.text, out.finish_reason)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "in.jsonl"], "needs --output"),
        (["--input", "none.jsonl", "--output", "out.jsonl"], "No such file"),
        (["--input", "empty.jsonl", "--output", "out.jsonl"], "has no lines"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--json"], "no --json"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--batch-size", "0"], "at least"),
        (["--prompt", "a", "--resume"], "--resume needs --input"),
        (["--prompt", "a", "--batch-size", "2"], "batch_size=2 needs --input"),
        (["--prompt", "a", "--process-id", "1"], "process_id=1 needs --distributed"),
        (["--prompt", "a", "--distributed", "--process-id", "1"], "go together"),
    ],
)
def test_options_that_do_not_fit(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", ["x"])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert main([*options, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
    assert not (tmp_path / "out.jsonl").exists()


def test_an_interrupted_run_says_how_to_go_on(golden_dir, tmp_path, monkeypatch, capsys):
    """And so does another one that finds its output."""
    source, out = write(tmp_path / "in.jsonl", prompts_of(3, 9)), tmp_path / "out.jsonl"
    argv = ["--model", str(golden_dir / "sdar"), "--input", str(source)]
    argv += ["--output", str(out), "--max-new-tokens", "4", "--compile-cache", "none"]

    def interrupted(*args, **options):
        out.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("dllm_jax.decode.decode_file", interrupted)
    assert main(argv) == 1
    assert capsys.readouterr().err.endswith(
        f"decode: interrupted; {out} has what was finished, --resume goes on\n"
    )
    assert main(argv) == 2
    assert "or --resume to go on" in capsys.readouterr().err
