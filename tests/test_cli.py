"""`python -m dllm_jax.decode`: what it prints, where, and its exit codes."""

import io
import json
import os
import subprocess
import sys

import jax
import pytest

import dllm_jax
from dllm_jax.decode import main

PROMPT = "Tom has 8 apples. He buys 5 more. He gives 3 to Ana. How many apples are left?"


@pytest.fixture(autouse=True)
def same_numbers():
    """The CLI sets up JAX for its process; here it must leave the suite's settings."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)


def run(capsys, *argv):
    code = main(["--compile-cache", "none", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prints_the_text_and_reports_on_stderr(capsys):
    code, out, err = run(capsys, "--prompt", PROMPT)
    assert code == 0
    [expected] = dllm_jax.generate(dllm_jax.load("demo"), [PROMPT])
    assert out == expected.text + "\n"
    for word in ("decoder=block", "threshold=0.9", "compile", "tokens/s", "cpu"):
        assert word in err


def test_json_has_exactly_the_fields_of_the_api(capsys):
    argv = ("--json", "--quiet", "--prompt", PROMPT, "--prompt", "Ana has 3 pens.")
    code, out, err = run(capsys, *argv, "--trace")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    prompts = [PROMPT, "Ana has 3 pens."]
    expected = dllm_jax.generate(dllm_jax.load("demo"), prompts, trace=True)
    for line, output in zip(lines, expected, strict=True):
        wanted = output.to_dict()
        assert line.keys() == wanted.keys()
        assert line["stats"].keys() == wanted["stats"].keys()
        assert line["tokens"] == wanted["tokens"]
        assert line["trace"] == wanted["trace"]


def test_stream_prints_the_same_text(capsys):
    _, plain, _ = run(capsys, "--quiet", "--prompt", PROMPT)
    code, streamed, _ = run(capsys, "--quiet", "--stream", "--prompt", PROMPT)
    assert code == 0
    assert streamed == plain


def test_names_of_other_projects_work(capsys):
    argv = ("--block_size", "4", "--gen_length=16", "--confidence-threshold", "0.7")
    code, _, err = run(capsys, "--prompt", PROMPT, *argv)
    assert code == 0
    assert "block_length=4" in err
    assert "max_new_tokens=16" in err
    assert "threshold=0.7" in err


def test_output_file(capsys, tmp_path):
    path = tmp_path / "out.jsonl"
    code, _, _ = run(capsys, "--prompt", PROMPT, "--output", str(path))
    assert code == 0
    assert json.loads(path.read_text())["text"]
    code, _, err = run(capsys, "--prompt", PROMPT, "--output", str(path))
    assert code == 2
    assert "exists" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


def test_prompt_file_and_ids(capsys, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n", encoding="utf-8")
    _, from_file, _ = run(capsys, "--quiet", "--prompt-file", str(path))
    model = dllm_jax.load("demo")
    ids = model.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    _, from_ids, _ = run(capsys, "--quiet", "--prompt-ids", ",".join(map(str, ids)))
    assert from_file == from_ids


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-ids", "1,x"], ["prompt_ids='1,x'"]),
        (["--prompt-ids", "1,99999"], ["99999", "vocabulary"]),
        (["--prompt-file", "no-such-file"], ["no-such-file"]),
        (["--model", "nowhere"], ["model='nowhere'"]),
        (["--max-new-tokens", "0"], ["max_new_tokens=0"]),
        (["--max-new-tokens", "500"], ["500", "256"]),
        (["--threshold", "nan"], ["threshold=nan"]),
        (["--top-k", "5"], ["top_k=5", "temperature"]),
        (["--decoder", "ar", "--block-length", "4"], ["block_length=4", "'ar'"]),
        (["--steps", "7"], ["steps=7"]),
        (["--decoder", "wino"], ["'block_causal'", "Those that fit it: block, ar"]),
        (["--model", "demo-llada", "--threshold", "1"], ["Decoders that have it: block"]),
        (["--decoder", "s2d2", "--fold-verify"], ["--fold-verify needs --reuse-verified"]),
        (["--preset", "best"], ["preset='best'", "sdar-static"]),
        (["--output", "no-such-dir/out.jsonl"], ["no-such-dir", "no such directory"]),
        (["--json", "--stream"], ["stream"]),
        (["--trace"], ["--trace needs", "--json or --output"]),
        (["--compile-cache", "/dev/null/x"], ["compile_cache="]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, argv, words):
    prompt = [] if argv[0].startswith("--prompt") else ["--prompt", PROMPT]
    if argv[0] == "--compile-cache":
        code = main([*argv, *prompt])
        err = capsys.readouterr().err
    else:
        code, _, err = run(capsys, *prompt, *argv)
    last = err.splitlines()[-1]
    assert code == 2
    assert last.startswith("decode: ")
    for word in words:
        assert word in last


def test_a_file_that_is_not_utf8(capsys, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("abc é".encode("latin-1"))
    code, _, err = run(capsys, "--prompt-file", str(path))
    assert code == 2
    assert "not UTF-8 at byte 4" in err


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--decoder", "x"], ["--seed", "a"]])
def test_bad_usage_exits_2(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_has_groups(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for word in ("model:", "generation:", "decoder settings:", "output:"):
        assert word in out
    assert "--decoder NAME --help lists those of a decoder" in out
    assert "--threshold" not in out


def test_without_arguments_it_solves_a_sample_problem(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decode"])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main() == 0
    out, err = capsys.readouterr()
    assert "####" in out and "How many" in err


def test_help_of_a_decoder_lists_its_own_settings(capsys):
    for argv in (["--decoder", "leap", "--help"], ["--help", "--decoder=leap"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "--tau FLOAT" in out and "may be unmasked" not in out
        assert "--small-block-size" not in out and "--eb-threshold" in out


def test_a_model_without_a_tokenizer_prints_ids(golden_dir, capsys):
    model = str(golden_dir / "sdar")
    argv = ["--model", model, "--prompt-ids", "5,6,7", "--max-new-tokens", "4", "--quiet"]
    code, out, _ = run(capsys, *argv)
    [expected] = dllm_jax.generate(dllm_jax.load(model), [[5, 6, 7]], max_new_tokens=4)
    assert code == 0 and expected.tokens
    assert out == ",".join(map(str, expected.tokens)) + "\n"


def test_names_in_place_of_models_are_told():
    model, told = dllm_jax.load("demo"), r"must be a loaded model: dllm_jax.load\('demo"
    for call in (
        lambda: dllm_jax.generate("demo", PROMPT),
        lambda: dllm_jax.stream("demo", PROMPT),
        lambda: dllm_jax.infill("demo-llada", "[MASK]"),
        lambda: dllm_jax.log_likelihood("demo", ["a"], ["b"]),
        lambda: dllm_jax.generate(model, PROMPT, "simsd", draft_model="demo-draft"),
    ):
        with pytest.raises(ValueError, match=told):
            call()


def _process(*argv, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "dllm_jax.decode", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        **options,
    )


def test_a_process_reads_stdin_and_uses_the_compilation_cache(tmp_path):
    argv = ("--compile-cache", str(tmp_path), "--max-new-tokens", "16")
    result = _process(*argv, input=PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Traceback" not in result.stderr

    def programs():
        # Others are kept if compiling them took long, which is a matter of luck.
        names = [n for n in os.listdir(tmp_path) if n.startswith("jit_go_on")]
        return sorted(n for n in names if n.endswith("-cache"))

    compiled = programs()
    assert len(compiled) == 1
    again = _process(*argv, input=PROMPT)
    assert again.stdout == result.stdout
    assert programs() == compiled


@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_a_device_that_is_not_there_is_an_error(device):
    result = _process("--device", device, "--prompt", PROMPT)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"decode: device={device!r}")


def test_stdin_that_is_a_file_object_without_descriptor(capsys, monkeypatch):
    class NoDescriptor(io.StringIO):
        def fileno(self):
            raise io.UnsupportedOperation("fileno")

    monkeypatch.setattr(sys, "stdin", NoDescriptor(""))
    code, out, _ = run(capsys, "--quiet")
    assert code == 0
    assert out.strip()
