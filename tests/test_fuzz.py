"""Bad input of every kind, drawn by hypothesis; `fuzz.py` has the targets."""

import json
import os

import numpy as np
import pytest
from fuzz import TARGETS, published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dllm_jax.decode import main
from dllm_jax.hf import CheckpointError, HFCheckpoint
from dllm_jax.model import load_config, resolve_model_path
from dllm_jax.prompts import token_ids
from dllm_jax.tokenizer import Tokenizer

# How many of each in a test run: those that write or read checkpoints are slow.
_EXAMPLES = {"convert": 12, "load": 12, "open": 150, "flags": 300}
_FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of casts that are refused
@pytest.mark.parametrize("name", TARGETS)
def test_mistakes_are_told(name):
    """Whatever the bytes, the input is taken or refused in one line."""
    count = _EXAMPLES.get(name, 200) * _FACTOR

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=4, max_size=200))
    def check(data):
        TARGETS[name](data)

    check()


def _checkpoint(directory, family="sdar", **spoilt):
    """A tiny checkpoint with other contents of some files (a function of the JSON)."""
    files = dict(published(family))
    for name, change in spoilt.items():
        file = f"{name}.json".replace("index", "model.safetensors.index")
        value = json.loads(files[file])
        files[file] = change(value).encode()
    for name, raw in files.items():
        (directory / name).write_bytes(raw)
    return directory


def _with(**changes):
    return lambda value: json.dumps({**value, **changes})


@pytest.mark.parametrize(
    ("family", "spoilt", "words"),
    [
        # Sizes that would be listed, or multiplied out, for hours.
        ("sdar", {"config": _with(num_hidden_layers=2**31 - 1)}, ["describes", "tensors"]),
        ("sdar", {"config": _with(head_dim=10**309)}, ["head_dim", "below 2**31"]),
        ("sdar", {"config": _with(rope_theta=float("inf"))}, ["rope_theta", "number"]),
        ("llada2", {"config": _with(n_group=0)}, ["num_groups=0", "at least 1"]),
        # More digits than Python reads.
        ("sdar", {"config": lambda value: '{"a": 1' + "0" * 5000 + "}"}, ["config.json"]),
        ("sdar", {"tokenizer": _with(model=[1])}, ["tokenizer's files are damaged"]),
        ("sdar", {"tokenizer_config": _with(added_tokens_decoder=[1])}, ["are damaged"]),
        ("sdar", {"index": _with(weight_map={"x": "a" * 300})}, ["not there", "aaa"]),
        ("sdar", {"index": _with(weight_map={"x": "a\nb"})}, ["not there", "a b"]),
    ],
)
def test_checkpoints_that_fuzzing_found(tmp_path, family, spoilt, words):
    with pytest.raises(CheckpointError) as told:
        HFCheckpoint(_checkpoint(tmp_path, family, **spoilt))
    for word in [str(tmp_path), *words]:
        assert word in str(told.value)
    assert "\n" not in str(told.value)


def test_what_else_fuzzing_found(tmp_path, capsys):
    model = load_config("demo")
    with pytest.raises(ValueError, match="half a character at 4"):
        Tokenizer(resolve_model_path("demo"), model.mask_id).encode("Ana \ud800")
    with pytest.raises(ValueError, match=r"prompt array\(.*\.\.\..*must be a text") as told:
        token_ids(model, np.zeros((1, 100), np.uint8))
    assert "\n" not in str(told.value)
    long = "a" * 300
    for argv in (["--output", long], ["--model", long], ["--draft-model", long]):
        assert main(["--prompt", "x", *argv]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("decode: ") and long in line
    with pytest.raises(SystemExit):
        main(["a\nb"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("decode: unrecognized arguments: a b; a prompt goes")
