"""The converter: what it writes, and one-line refusals that leave nothing behind."""

import errno
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import dllm_jax
from convert.__main__ import main
from dllm_jax import layouts, transformer
from dllm_jax.checkpoint import read_sidecar, write_checkpoint
from dllm_jax.hf import CheckpointError, HFCheckpoint, count_bytes
from dllm_jax.models import FAMILIES
from dllm_jax.params import leaf_paths

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 16381470720\n"
)

HEAD, EMBED, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
KEY_NORM = "model.layers.2.self_attn.k_norm.weight"


# --- sources to spoil -----------------------------------------------------------------


class Source:
    """A Hugging Face checkpoint in memory, before it is written."""

    def __init__(self, family: str):
        self.config = json.loads((GOLDEN / family / "config.json").read_text())
        self.tensors = dict(load_file(GOLDEN / family / "model.safetensors"))
        self.files = {}  # further files: name -> JSON value, text or bytes

    def cast(self, dtype) -> "Source":
        self.tensors = {name: x.astype(dtype) for name, x in self.tensors.items()}
        return self

    def spoil(self, name: str, value: float) -> "Source":
        """Sets one number of a tensor."""
        tensor = self.tensors[name].copy()
        tensor.reshape(-1)[tensor.size // 2] = value
        self.tensors[name] = tensor
        return self

    def write(self, directory: Path, shards: int = 1) -> Path:
        """Writes it; with several shards, a layer's tensors are spread over all files."""
        directory.mkdir(parents=True)
        for name, value in {"config.json": self.config, **self.files}.items():
            write_file(directory / name, value)
        if shards == 1:
            save(directory / "model.safetensors", self.tensors)
            return directory
        weight_map = {}
        for index in range(shards):
            names = sorted(self.tensors)[index::shards]
            save(directory / shard(index, shards), {n: self.tensors[n] for n in names})
            weight_map |= dict.fromkeys(names, shard(index, shards))
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_file(directory / INDEX, index)
        return directory


INDEX = "model.safetensors.index.json"


def shard(index: int, shards: int = 3) -> str:
    return f"model-{index + 1:05}-of-{shards:05}.safetensors"


def save(path: Path, tensors: dict) -> None:
    # ascontiguousarray would make a vector of a scalar.
    contiguous = {n: np.ascontiguousarray(x) if x.ndim else x for n, x in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def write_file(path: Path, value) -> None:
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        text = value if isinstance(value, str) else json.dumps(value, indent=2)
        path.write_text(text, encoding="utf-8")


def edit_json(path: Path, **changes) -> None:
    write_file(path, {**json.loads(path.read_text()), **changes})


def write_raw(path: Path, header, data: bytes = b"") -> None:
    """A safetensors file with whatever header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


WORDS = {
    "<|im_end|>": 249,
    "<|endoftext|>": 250,
    "<pad>": 251,
    "<bos>": 252,
    "<|MASK|>": 253,
}


def tokenizer_files(**special) -> dict:
    """A word-level tokenizer of 256 words; `special` as in tokenizer_config.json."""
    names = {index: word for word, index in WORDS.items()}
    vocabulary = {names.get(index, f"w{index}"): index for index in range(256)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(WORDS))
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
        },
    }


# --- running it -----------------------------------------------------------------------


def tree(directory: Path) -> dict[str, int | None]:
    """Every path below a directory, with the sizes of files."""
    return {
        str(path.relative_to(directory)): path.stat().st_size if path.is_file() else None
        for path in directory.rglob("*")
    }


def convert(*argv) -> int:
    """The converter in this process; a NumPy warning would be a line on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return main([str(argument) for argument in argv])


@pytest.fixture
def refusal(tmp_path, capsys):
    """Runs a conversion that must fail as a user's mistake; returns its one line."""

    def check(source, *flags, destination=None, code=2) -> str:
        before = tree(tmp_path)
        got = convert(source, destination or tmp_path / "out", *flags)
        out, err = capsys.readouterr()
        assert (got, out) == (code, "")
        assert err.startswith("convert: ") and err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert tree(tmp_path) == before, "something was left behind"
        return err

    return check


@pytest.fixture
def success(tmp_path, capsys):
    """Runs a conversion that must succeed; returns destination and report."""

    def check(source, *flags, destination=None) -> tuple[Path, str]:
        destination = Path(destination or tmp_path / "out")
        code = convert(source, destination, *flags)
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        leftovers = list(destination.resolve().parent.glob(".*"))
        assert not [path for path in leftovers if path.name.endswith(".partial")]
        return destination, out

    return check


def says(line: str, words) -> None:
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"


@functools.partial(jax.jit, static_argnames="config")
def run_model(params, config, tokens):
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    if config.attention == "bidirectional":
        fields = layouts.bidirectional(position)
    else:
        fields = layouts.block_causal(position, config.block_length)
    out = transformer.forward(params, config, tokens, fields)
    return transformer.logits(params, out.hidden)


def logits(model) -> np.ndarray:
    """Logits of 96 fixed tokens, far enough for RoPE to matter."""
    tokens = jax.random.randint(jax.random.key(0), (1, 96), 0, model.config.vocab_size)
    return np.asarray(run_model(model.params, model.config, tokens))


def leaves(model) -> dict[str, np.ndarray]:
    out = {}
    for path in leaf_paths(model.config):
        value = model.params
        for name in path.split("."):
            value = getattr(value, name)
        out[path] = np.asarray(value)
    return out


def assert_same_bits(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        np.testing.assert_array_equal(
            np.ascontiguousarray(got[name]).view(np.uint8),
            np.ascontiguousarray(value).view(np.uint8),
            err_msg=name,
        )


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    """A converted checkpoint of each family; copy before spoiling."""
    out = {}
    for family in ("sdar", "llada"):
        out[family] = tmp_path_factory.mktemp("converted") / family
        assert convert(GOLDEN / family, out[family]) == 0
    return out


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    """A converted SDAR to spoil."""
    return Path(shutil.copytree(converted["sdar"], tmp_path / "copy"))


# --- what it writes -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_converted_model_is_the_published_one(converted, family):
    published = dllm_jax.load(str(GOLDEN / family), dtype="float32")
    ours = dllm_jax.load(str(converted[family]), dtype="float32")
    assert ours.config == published.config
    assert_same_bits(leaves(ours), leaves(published))
    np.testing.assert_array_equal(logits(ours), logits(published))


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f not in ("sdar", "llada") and (GOLDEN / f).is_dir()],
)
def test_every_other_family(tmp_path, success, family):
    source = Source(family)
    source.config.setdefault("mask_token_id", 253)  # some publish it nowhere
    directory = source.write(tmp_path / "src", 3)
    destination, _ = success(directory)
    assert read_sidecar(destination).family == family
    ours, theirs = (
        dllm_jax.load(str(path), dtype="float32") for path in (destination, directory)
    )
    assert ours.config == theirs.config
    assert_same_bits(leaves(ours), leaves(theirs))


def test_matrices_are_transposed_and_stacked(converted):
    """Spelt out once, since square matrices hide a missing transposition."""
    tensors = load_file(GOLDEN / "sdar" / "model.safetensors")
    params = dllm_jax.load(str(converted["sdar"]), dtype="float32").params
    np.testing.assert_array_equal(params.embed, tensors[EMBED])
    np.testing.assert_array_equal(params.head, tensors[HEAD].T)
    np.testing.assert_array_equal(params.layers.q[1], tensors[QUERY].T)
    np.testing.assert_array_equal(params.layers.down[1], tensors[DOWN].T)
    np.testing.assert_array_equal(params.layers.k_norm[2], tensors[KEY_NORM])
    key = "model.layers.2.self_attn.k_proj.weight"  # square
    np.testing.assert_array_equal(params.layers.k[2], tensors[key].T)


def test_llada_tells_its_two_ff_out_apart(converted):
    tensors = load_file(GOLDEN / "llada" / "model.safetensors")
    params = dllm_jax.load(str(converted["llada"]), dtype="float32").params
    head = tensors["model.transformer.ff_out.weight"]
    down = tensors["model.transformer.blocks.2.ff_out.weight"]
    np.testing.assert_array_equal(params.head, head.T)
    np.testing.assert_array_equal(params.layers.down[2], down.T)


@pytest.mark.parametrize("shards", [2, 5, 36])
def test_shards_give_the_same_as_one_file(converted, tmp_path, success, shards):
    """A layer is spread over the files; 36 shards hold one tensor each."""
    source = Source("sdar").write(tmp_path / "src", shards)
    destination, _ = success(source)
    want = read_sidecar(converted["sdar"]).checksums
    assert read_sidecar(destination).checksums == want


def test_sidecar(converted):
    values = json.loads((converted["sdar"] / "dllm.json").read_text())
    config = values["config"]
    assert values["family"] == "sdar"
    assert values["dtype"] == "float32"
    assert values["source"] == str(GOLDEN / "sdar")
    assert values["revision"] is None
    assert values["tokenizer_files"] == []
    assert values["ids"] == {"mask_id": 253, "eos_ids": [250], "pad_id": None}
    assert values["checksums"].keys() == {path.name for path in params_of(converted)}
    want = {
        "vocab_size": 256,
        "num_layers": 3,
        "embed_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffw_dim": 128,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_positions": 512,
        "qk_norm": True,
        "tied_head": False,
        "attention": "block_causal",
        "logit_alignment": "same",
        "block_length": 4,
        "mask_id": 253,
        "eos_ids": [250],
        "pad_id": None,
        "bos_id": 250,
    }
    assert {name: config[name] for name in want} == want
    llada = json.loads((converted["llada"] / "dllm.json").read_text())
    assert llada["family"] == "llada"
    assert llada["ids"] == {"mask_id": 250, "eos_ids": [240], "pad_id": 240}
    assert llada["config"]["attention"] == "bidirectional"


def params_of(converted) -> list[Path]:
    return sorted((converted["sdar"] / "params").iterdir())


def test_report(tmp_path, success):
    _, report = success(GOLDEN / "sdar", "--dtype", "bfloat16")
    # 180,864 parameters of two bytes.
    words = ("sdar", "180,864 parameters", "361,728 bytes", "float32 -> bfloat16")
    says(report, (str(tmp_path / "out"), *words, "verified", "peak RAM", " s "))


def test_progress_counts_every_byte(tmp_path):
    source, seen = HFCheckpoint(GOLDEN / "sdar"), {}
    write_checkpoint(source, tmp_path / "out", "float16", "sdar", None, seen.__setitem__)
    assert seen.keys() == leaf_paths(source.config).keys()
    assert sum(seen.values()) == count_bytes(source.config, np.float16)


def test_tokenizer_files_are_copied(tmp_path, success):
    source = Source("sdar")
    source.files = {
        **tokenizer_files(eos_token="<|im_end|>", mask_token="<|MASK|>"),
        "special_tokens_map.json": {"mask_token": "<MASK>"},
        "added_tokens.json": {"<MASK>": 253},
        "merges.txt": "#version: 0.2\n",
        "tokenizer.model": b"\x00\xff",
        "chat_template.jinja": "{{ messages }}é",
        "generation_config.json": {"eos_token_id": [249, 250]},
        "README.md": "not ours",
        "modeling_sdar.py": "raise SystemExit('code of a checkpoint must not run')",
    }
    directory = source.write(tmp_path / "src")
    destination, _ = success(directory)
    kept = set(source.files) - {"generation_config.json", "README.md", "modeling_sdar.py"}
    assert set(read_sidecar(destination).tokenizer_files) == kept
    for name in kept:
        assert (destination / name).read_bytes() == (directory / name).read_bytes()
    names = {path.name for path in destination.iterdir()}
    assert names == {*kept, "dllm.json", "params"}
    ours, theirs = (dllm_jax.load(str(path)) for path in (destination, directory))
    text = "w7 w8 <|im_end|>"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text) == [7, 8, 249]


@pytest.mark.parametrize("link", [False, True], ids=["plain", "linked_files"])
def test_revision_of_a_hub_cache(tmp_path, success, link):
    """A hub cache keeps links to blobs in .../snapshots/COMMIT."""
    cache = tmp_path / "models--JetLM--SDAR-1.7B-Chat" / "snapshots" / COMMIT
    source = Source("sdar").write(cache, 2)
    if link:
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        for path in sorted(source.iterdir()):
            path.rename(blobs / path.name)
            path.symlink_to(blobs / path.name)
    destination, _ = success(source)
    assert read_sidecar(destination).revision == COMMIT


def fake_hub(monkeypatch, directory: Path) -> list[dict]:
    """A hub whose download is a local directory; returns the list of requests."""
    requests = []

    def download(repo_id, **options):
        requests.append({"repo_id": repo_id, **options})
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return requests


def test_hub_id(tmp_path, success, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "hub" / "models--JetLM--SDAR-1.7B-Chat" / "snapshots" / COMMIT
    requests = fake_hub(monkeypatch, Source("sdar").write(cache))
    destination, _ = success("JetLM/SDAR-1.7B-Chat", "--revision", "main")
    [request] = requests
    assert (request["repo_id"], request["revision"]) == ("JetLM/SDAR-1.7B-Chat", "main")
    assert not any("py" in pattern for pattern in request["allow_patterns"])
    sidecar = read_sidecar(destination)
    assert (sidecar.source, sidecar.revision) == ("JetLM/SDAR-1.7B-Chat", COMMIT)
    assert sidecar.config.block_length == 4


def test_hub_id_keeps_its_block_length(tmp_path, success, monkeypatch):
    """A cache's directory is named after the commit; the suffix is in the hub id."""
    monkeypatch.chdir(tmp_path)
    source = Source("sdar")
    del source.config["block_size"]  # as on the hub
    cache = tmp_path / "hub" / "models--JetLM--SDAR-1.7B-Chat-b16" / "snapshots" / COMMIT
    fake_hub(monkeypatch, source.write(cache))
    destination, _ = success("JetLM/SDAR-1.7B-Chat-b16")
    assert read_sidecar(destination).config.block_length == 16


def test_block_length_of_a_directory(tmp_path, success):
    source = Source("sdar")
    del source.config["block_size"]
    destination, _ = success(source.write(tmp_path / "SDAR-1.7B-Chat-b16"))
    assert read_sidecar(destination).config.block_length == 16
    assert dllm_jax.load(str(destination)).config.block_length == 16


def test_eos_ids_are_the_union(tmp_path, success):
    source = Source("sdar")
    source.files = {
        **tokenizer_files(eos_token="<|im_end|>", pad_token={"content": "<pad>"}),
        "generation_config.json": {"eos_token_id": [248, 247]},
    }
    destination, _ = success(source.write(tmp_path / "src"))
    config = read_sidecar(destination).config
    assert sorted(config.eos_ids) == [247, 248, 249, 250]
    assert config.pad_id == 251


@pytest.mark.parametrize("head", ["absent", "equal"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tied_head(tmp_path, success, head, shards):
    source = Source("sdar")
    source.config["tie_word_embeddings"] = True
    if head == "absent":
        del source.tensors[HEAD]
    else:
        source.tensors[HEAD] = source.tensors[EMBED]
    directory = source.write(tmp_path / "src", shards)
    destination, report = success(directory)
    assert "164,480 parameters" in report  # 256 * 64 less than with a head
    assert not (destination / "params" / "head").exists()
    ours, theirs = (dllm_jax.load(str(path)) for path in (destination, directory))
    assert ours.params.head is None
    assert_same_bits(leaves(ours), leaves(theirs))


def test_tied_head_of_llada(tmp_path, success):
    source = Source("llada")
    source.config["weight_tying"] = True
    del source.tensors["model.transformer.ff_out.weight"]
    destination, _ = success(source.write(tmp_path / "src"))
    assert read_sidecar(destination).config.tied_head


def test_family_override(tmp_path, success):
    source = Source("sdar")
    source.config |= {"architectures": ["MySDARFork"], "model_type": "fork"}
    destination, _ = success(source.write(tmp_path / "src"), "--family", "sdar")
    assert read_sidecar(destination).family == "sdar"


def test_model_type_counts_where_architectures_is_silent(tmp_path, success):
    source = Source("sdar")
    del source.config["architectures"]
    destination, _ = success(source.write(tmp_path / "src"))
    assert read_sidecar(destination).family == "sdar"


def test_relative_paths(tmp_path, success, monkeypatch):
    Source("sdar").write(tmp_path / "a" / "src")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    success("src", destination="../b/out")
    monkeypatch.chdir(tmp_path / "b")
    code = convert("verify", "out")
    assert code == 0
    assert read_sidecar(tmp_path / "b" / "out").source == "src"


def test_awkward_names_and_new_parents(tmp_path, success):
    source = Source("sdar").write(tmp_path / "quelle ü %20 #1")
    destination, _ = success(source, destination=tmp_path / "new" / "a b%2Fü?" / "x#y")
    assert convert("verify", destination) == 0


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_dtype_as_stored(tmp_path, success, dtype):
    source = Source("sdar").cast(dtype)
    destination, report = success(source.write(tmp_path / "src"))
    assert f"{dtype} -> {dtype}" in report
    assert read_sidecar(destination).dtype == str(dtype)
    model = dllm_jax.load(str(destination), dtype=str(dtype))
    assert model.params.embed.dtype == dtype
    got = leaves(model)
    assert_same_bits({"e": got["embed"]}, {"e": source.tensors[EMBED]})
    assert_same_bits({"q": got["layers.q"][1]}, {"q": source.tensors[QUERY].T})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_asked_for(tmp_path, success, dtype):
    destination, report = success(GOLDEN / "sdar", "--dtype", dtype)
    assert f"float32 -> {dtype}" in report
    assert read_sidecar(destination).dtype == dtype
    want = load_file(GOLDEN / "sdar" / "model.safetensors")[QUERY].T.astype(dtype)
    got = leaves(dllm_jax.load(str(destination), dtype=dtype))["layers.q"][1]
    assert_same_bits({"q": got}, {"q": want})


def test_restore_in_another_dtype(converted, tmp_path, success):
    """Narrower rounds as NumPy does, wider is exact."""
    exact = leaves(dllm_jax.load(str(converted["sdar"]), dtype="float32"))
    for dtype in ("bfloat16", "float16"):
        narrow = leaves(dllm_jax.load(str(converted["sdar"]), dtype=dtype))
        assert_same_bits(narrow, {n: x.astype(dtype) for n, x in exact.items()})
    destination, _ = success(GOLDEN / "sdar", "--dtype", "bfloat16")
    stored = leaves(dllm_jax.load(str(destination), dtype="bfloat16"))
    wide = leaves(dllm_jax.load(str(destination), dtype="float32"))
    assert_same_bits(wide, {n: x.astype(np.float32) for n, x in stored.items()})


def test_float64_needs_a_choice(tmp_path, refusal, success):
    source = Source("sdar").cast(np.float64).write(tmp_path / "src")
    says(refusal(source), ("float64", "--dtype", "float32"))
    destination, _ = success(source, "--dtype", "float32")
    embed = load_file(GOLDEN / "sdar" / "model.safetensors")[EMBED]
    assert_same_bits({"e": leaves(dllm_jax.load(str(destination)))["embed"]}, {"e": embed})


@pytest.mark.parametrize("stored", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize(("name", "value"), [(EMBED, 7e4), (UP, -7e4), (NORM, 7e4)])
def test_float16_overflow(tmp_path, refusal, stored, name, value):
    source = Source("sdar").cast(stored).spoil(name, value).write(tmp_path / "src")
    says(refusal(source, "--dtype", "float16"), (name, "overflows", "float16", "--dtype"))


def test_other_overflows(tmp_path, refusal, success):
    large = Source("sdar").spoil(UP, np.finfo(np.float32).max).write(tmp_path / "f32")
    says(refusal(large, "--dtype", "bfloat16"), (UP, "overflows", "bfloat16"))
    larger = Source("sdar").cast(np.float64).spoil(UP, 1e39).write(tmp_path / "f64")
    says(refusal(larger, "--dtype", "float32"), (UP, "overflows", "float32"))
    success(Source("sdar").spoil(UP, 7e4).write(tmp_path / "fits"), "--dtype", "bfloat16")


@pytest.mark.parametrize("stored", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(tmp_path, refusal, stored, value):
    source = Source("sdar").cast(stored).spoil(QUERY, value).write(tmp_path / "src")
    says(refusal(source), (QUERY, "1 values", "not finite"))
    if stored is np.float32:
        says(refusal(source, "--dtype", "bfloat16"), (QUERY, "not finite"))


@pytest.mark.parametrize("dtype", ["int8", "int32", "float8_e4m3fn"])
def test_unsupported_dtype(tmp_path, refusal, dtype):
    source = Source("sdar")
    source.tensors[UP] = source.tensors[UP].astype(dtype)
    line = refusal(source.write(tmp_path / "src"))
    says(line, (UP, "model.safetensors", "BF16"))


# --- wrong tensors --------------------------------------------------------------------


def _drop(source):
    del source.tensors[UP]


def _add(source):
    source.tensors["model.layers.1.mlp.up_proj.bias"] = np.zeros(128, np.float32)


def _add_layer(source):
    name = UP.replace("layers.1", "layers.3")
    source.tensors[name] = source.tensors[UP]


def _rename(source):
    source.tensors["transformer." + UP] = source.tensors.pop(UP)


def _transpose(source):
    source.tensors[UP] = source.tensors[UP].T


def _cut(source):
    source.tensors[OUT] = source.tensors[OUT][:, :-1]


def _flatten(source):
    source.tensors[NORM] = source.tensors[NORM][None]


def _no_head(source):
    del source.tensors[HEAD]


def _other_tied_head(source):
    source.config["tie_word_embeddings"] = True


def _almost_tied_head(source):
    source.config["tie_word_embeddings"] = True
    source.tensors[HEAD] = source.tensors[EMBED]
    source.spoil(HEAD, 1e-9)


def _short_tied_head(source):
    source.config["tie_word_embeddings"] = True
    source.tensors[HEAD] = source.tensors[EMBED][:-1]


def _scalar_tied_head(source):
    source.config["tie_word_embeddings"] = True
    source.tensors[HEAD] = np.array(1.0, np.float32)


WRONG_TENSORS = {
    _drop: ("missing", UP),
    _add: ("unexpected", "model.layers.1.mlp.up_proj.bias"),
    _add_layer: ("unexpected", "model.layers.3.mlp.up_proj.weight"),
    _rename: ("missing", "unexpected", UP, "transformer." + UP),
    _transpose: (UP, "[64, 128]", "[128, 64]"),
    _cut: (OUT, "[64, 127]", "[64, 128]"),
    _flatten: (NORM, "[1, 64]", "[64]"),
    _no_head: ("missing", HEAD),
    _other_tied_head: (HEAD, EMBED, "differs"),
    _almost_tied_head: (HEAD, EMBED, "differs"),
    _short_tied_head: (HEAD, "[255, 64]"),
    _scalar_tied_head: (HEAD, "[]", "[256, 64]"),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fault", WRONG_TENSORS, ids=lambda f: f.__name__.strip("_"))
def test_wrong_tensors(tmp_path, refusal, fault, shards):
    source = Source("sdar")
    fault(source)
    directory = source.write(tmp_path / "src", shards)
    says(refusal(directory), (str(directory), *WRONG_TENSORS[fault]))


def test_wrong_tensors_of_llada(tmp_path, refusal):
    source = Source("llada")
    source.tensors["model.transformer.blocks.0.att_proj.weight"] = source.tensors.pop(
        "model.transformer.blocks.0.q_proj.weight"
    )
    line = refusal(source.write(tmp_path / "src"))
    says(line, ("missing", "blocks.0.q_proj.weight", "unexpected", "blocks.0.att_proj"))


def test_config_of_another_size(tmp_path, refusal):
    """Every tensor of the layers that the config does not know, and all shapes."""
    source = Source("sdar")
    source.config |= {"num_hidden_layers": 2, "intermediate_size": 96}
    line = refusal(source.write(tmp_path / "src"))
    for name in source.tensors:
        assert (name in line) == ("layers.2" in name or ".mlp." in name), name


@pytest.mark.parametrize("shards", [(0, 1), (0, 2)])
def test_tensor_in_two_shards(tmp_path, refusal, shards):
    source = Source("sdar").write(tmp_path / "src", 3)
    first, second = (source / shard(index) for index in shards)
    name = sorted(load_file(first))[0]
    save(second, {**load_file(second), name: load_file(first)[name]})
    says(refusal(source), ("twice", name))


def test_many_tensors_in_two_shards(tmp_path, refusal):
    """All duplicates are named, not the first few."""
    source = Source("sdar").write(tmp_path / "src", 3)
    first = load_file(source / shard(0))
    save(source / shard(1), {**load_file(source / shard(1)), **first})
    assert len(first) == 12
    says(refusal(source), first)


def test_all_faults_of_tensors_in_one_message(tmp_path, refusal):
    """Missing, unexpected, mis-shaped and duplicate, in different files."""
    source = Source("sdar")
    _drop(source)
    _add(source)
    source.tensors[OUT] = source.tensors[OUT].T
    directory = source.write(tmp_path / "src", 3)
    first, last = directory / shard(0), directory / shard(2)
    name = sorted(load_file(first))[0]
    save(last, {**load_file(last), name: load_file(first)[name]})
    words = ("missing", UP, "unexpected", "up_proj.bias", OUT, "[128, 64]", name)
    says(refusal(directory), words)


def test_missing_unexpected_and_shapes_in_one_message(tmp_path, refusal):
    source = Source("sdar")
    _drop(source)
    _add(source)
    _no_head(source)
    source.tensors[OUT] = source.tensors[OUT].T
    source.tensors[NORM] = source.tensors[NORM][:3]
    line = refusal(source.write(tmp_path / "src", 3))
    says(line, ("missing", UP, HEAD, "unexpected", "up_proj.bias", OUT, NORM, "[3]"))


# --- wrong files ----------------------------------------------------------------------


def _lfs_pointer(path):
    path.write_bytes(LFS_POINTER)


def _truncated_data(path):
    path.write_bytes(path.read_bytes()[:-1])


def _truncated_header(path):
    path.write_bytes(path.read_bytes()[:100])


def _header_size_alone(path):
    path.write_bytes(path.read_bytes()[:8])


def _seven_bytes(path):
    path.write_bytes(path.read_bytes()[:7])


def _empty(path):
    path.write_bytes(b"")


def _garbage(path):
    path.write_bytes(np.random.default_rng(0).bytes(4096))


def _zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def _web_page(path):
    path.write_bytes(b"<!DOCTYPE html><html><title>401: log in</title></html>\n")


def _header_no_json(path):
    write_raw(path, b"{" + b"x" * 100)


def _header_no_text(path):
    write_raw(path, b"{\xff\xfe\x00" + b"x" * 100)


def _entry_without_offsets(path):
    write_raw(path, {UP: {"dtype": "F32", "shape": [128, 64]}})


def _entry_is_a_list(path):
    write_raw(path, {UP: [1, 2]})


def _offsets_are_text(path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}
    write_raw(path, {UP: entry}, b"\0" * 4)


def _trailing_bytes(path):
    """A resumed download that was appended to a whole file."""
    path.write_bytes(path.read_bytes() + b"\0" * 512)


def _offsets_that_are_no_shape(path):
    """Every byte is there, but a tensor's offsets do not fit its shape."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"][1] -= 4
    write_raw(path, header, data[8 + size :])


def _gone(path):
    path.unlink()


def _dangling_link(path):
    path.unlink()
    path.symlink_to(path.parent / "blob-that-never-arrived")


def _directory(path):
    path.unlink()
    path.mkdir()


def _unreadable(path):
    """Marks the file; the test makes opening it fail, as permissions bind no root."""


WRONG_FILES = {
    _lfs_pointer: ("LFS pointer", "git lfs pull"),
    _truncated_data: ("truncated", "download"),
    _truncated_header: ("truncated", "download"),
    _header_size_alone: (),
    _seven_bytes: ("truncated",),
    _empty: ("truncated", "0 bytes"),
    _garbage: ("not a safetensors file",),
    _zeros: (),
    _web_page: ("not a safetensors file",),
    _header_no_json: ("header",),
    _header_no_text: ("header",),
    _entry_without_offsets: ("header",),
    _entry_is_a_list: ("header",),
    _offsets_are_text: (),
    _trailing_bytes: (),
    _offsets_that_are_no_shape: (),
    _gone: (),
    _dangling_link: (),
    _directory: (),
    _unreadable: (),
}


def refuse_to_open(monkeypatch, unreadable: Path) -> None:
    """Opening one file fails as it would for a user without the right to read it."""
    import builtins
    import io

    real = io.open

    def opening(file, *args, **kwargs):
        if isinstance(file, str | os.PathLike) and Path(file) == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr(builtins, "open", opening)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fault", WRONG_FILES, ids=lambda f: f.__name__.strip("_"))
def test_wrong_files(tmp_path, refusal, monkeypatch, fault, shards):
    source = Source("sdar").write(tmp_path / "src", shards)
    path = source / ("model.safetensors" if shards == 1 else shard(1))
    fault(path)
    if fault is _unreadable:
        refuse_to_open(monkeypatch, path)
    line = refusal(source)
    # Without its only file, a directory is one that has no such files at all.
    named = "*.safetensors" if shards == 1 and fault is _gone else path.name
    says(line, (str(source), named, *WRONG_FILES[fault]))


def test_all_bad_files_in_one_message(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 5)
    _lfs_pointer(source / shard(0, 5))
    _truncated_data(source / shard(1, 5))
    _empty(source / shard(2, 5))
    line = refusal(source)
    says(line, (shard(0, 5), "LFS", shard(1, 5), shard(2, 5)))
    assert shard(3, 5) not in line


def test_missing_and_bad_shards_in_one_message(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 5)
    (source / shard(0, 5)).unlink()
    _lfs_pointer(source / shard(1, 5))
    _truncated_data(source / shard(2, 5))
    says(refusal(source), [shard(index, 5) for index in range(3)])


def test_missing_shards_are_counted(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 5)
    for index in (1, 3):
        (source / shard(index, 5)).unlink()
    says(refusal(source), ("2 of 5", shard(1, 5), shard(3, 5), "download"))


def test_index_names_tensors_that_no_file_holds(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 3)
    tensors = load_file(source / shard(1))
    name = sorted(tensors)[2]
    del tensors[name]
    save(source / shard(1), tensors)
    says(refusal(source), ("index", name, "download"))


def test_file_holds_tensors_that_the_index_does_not_name(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 3)
    index = json.loads((source / INDEX).read_text())
    name = sorted(index["weight_map"])[4]
    del index["weight_map"][name]
    write_file(source / INDEX, index)
    says(refusal(source), ("index", name, "download"))


def test_index_names_the_wrong_file(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 3)
    index = json.loads((source / INDEX).read_text())
    name = sorted(index["weight_map"])[0]
    index["weight_map"][name] = shard(2)
    write_file(source / INDEX, index)
    says(refusal(source), ("index", name))


def test_stale_index_and_wrong_tensors_in_one_message(tmp_path, refusal):
    """The index of an older upload: one tensor was renamed, another has a new shape."""
    source = Source("sdar")
    source.tensors[OUT] = source.tensors[OUT].T
    directory = source.write(tmp_path / "src", 3)
    path = next(p for p in directory.glob("*.safetensors") if UP in load_file(p))
    tensors = load_file(path)
    tensors["model.renamed"] = tensors.pop(UP)
    save(path, tensors)
    says(refusal(directory), (UP, "model.renamed", OUT))


@pytest.mark.parametrize(
    "file", ["../weights.safetensors", "/etc/passwd", "..", "sub/model.safetensors", "", 7]
)
def test_index_leaves_the_directory(tmp_path, refusal, file):
    source = Source("sdar").write(tmp_path / "src", 3)
    save(tmp_path / "weights.safetensors", Source("sdar").tensors)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"][UP] = file
    write_file(source / INDEX, index)
    says(refusal(source), ("index", str(file)))


@pytest.mark.parametrize(
    "value",
    ["{", "[]", "", {}, {"weight_map": {}}, {"weight_map": [1]}, LFS_POINTER, b"\xff\xfe"],
    ids=["broken", "list", "empty", "no_map", "empty_map", "map_is_list", "lfs", "bytes"],
)
def test_broken_index(tmp_path, refusal, value):
    source = Source("sdar").write(tmp_path / "src", 3)
    write_file(source / INDEX, value)
    says(refusal(source), (INDEX,))


def test_several_files_without_index(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src", 3)
    (source / INDEX).unlink()
    says(refusal(source), ("3 safetensors files", INDEX, "download"))


def test_torch_files_only(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    says(refusal(source), ("pytorch_model.bin", "safetensors"))


def test_config_alone(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src")
    (source / "model.safetensors").unlink()
    says(refusal(source), (str(source), "safetensors"))


# --- wrong sources --------------------------------------------------------------------


def test_source_does_not_exist(tmp_path, refusal, monkeypatch):
    def download(repo_id, **options):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for source in ("nothing", tmp_path / "nothing", "a/b/c", "./nothing", "../nothing"):
        says(refusal(source), (str(source), "neither a directory nor a hub id"))


def test_source_is_a_file(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src") / "model.safetensors"
    says(refusal(source), (str(source), "directory"))


def test_source_is_an_empty_directory(tmp_path, refusal):
    (tmp_path / "src").mkdir()
    says(refusal(tmp_path / "src"), (str(tmp_path / "src" / "config.json"),))


def test_hub_cannot_be_reached(tmp_path, refusal, monkeypatch):
    def download(repo_id, **options):
        raise OSError("no route to host\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    says(refusal("JetLM/SDAR-1.7B-Chat"), ("JetLM/SDAR-1.7B-Chat", "no route to host"))


def test_revision_of_a_directory(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src")
    says(refusal(source, "--revision", "main"), ("revision", str(source)))


@pytest.mark.parametrize(
    "flags", [("--dtype", "float8"), ("--family", "gpt"), ("--overwrote",)]
)
def test_wrong_flags(tmp_path, capsys, flags):
    with pytest.raises(SystemExit) as exit_:
        convert(GOLDEN / "sdar", tmp_path / "out", *flags)
    assert exit_.value.code == 2
    assert flags[-1] in capsys.readouterr().err
    assert not tree(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"],
)
@pytest.mark.parametrize(
    "text",
    ["{", "", "[1, 2]", b"\xff\xfe{}", LFS_POINTER],
    ids=["broken", "empty", "list", "bytes", "lfs"],
)
def test_broken_json(tmp_path, refusal, name, text):
    source = Source("sdar")
    source.files = tokenizer_files()
    directory = source.write(tmp_path / "src")
    write_file(directory / name, text)
    says(refusal(directory), (str(directory / name),))


@pytest.mark.parametrize("with_config", [True, False])
def test_tokenizer_is_an_lfs_pointer(tmp_path, refusal, with_config):
    """tokenizer.json is large enough to be kept in LFS; the weights may be whole."""
    source = Source("sdar")
    source.files = tokenizer_files()
    if not with_config:
        del source.files["tokenizer_config.json"]
    source.files["tokenizer.json"] = LFS_POINTER
    line = refusal(source.write(tmp_path / "src"))
    says(line, ("tokenizer.json", "LFS pointer", "git lfs pull"))


@pytest.mark.parametrize(
    "added",
    [
        [{"id": 253}],
        [{"content": "<|MASK|>"}],
        [{"id": "253", "content": "<|MASK|>"}],
        {"<|MASK|>": 253},
    ],
    ids=["no_content", "no_id", "id_is_text", "no_list"],
)
def test_malformed_tokenizer(tmp_path, capsys, added):
    """Either read with the ids that are there, or refused in one line."""
    source = Source("sdar")
    source.files = tokenizer_files(mask_token="<|MASK|>")
    source.files["tokenizer.json"] = {"added_tokens": added}
    code = convert(source.write(tmp_path / "src"), tmp_path / "out")
    err = capsys.readouterr().err
    assert (code, err.count("\n")) in ((0, 0), (2, 1))
    assert code == 0 or "tokenizer" in err


def test_config_is_missing(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src")
    (source / "config.json").unlink()
    says(refusal(source), (str(source / "config.json"), "does not exist"))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Foo"]},
        {"architectures": ["Foo"], "model_type": "foo"},
        {"architectures": [], "model_type": "foo"},
        {"architectures": None, "model_type": None},
        {"architectures": "Foo"},
        {"architectures": [None]},
        {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"},
    ],
    ids=str,
)
def test_unknown_architecture(tmp_path, refusal, changes):
    source = Source("sdar")
    source.config |= changes
    source.config = {key: x for key, x in source.config.items() if x is not None}
    line = refusal(source.write(tmp_path / "src"))
    says(line, ("architectures", "SDARForCausalLM", "LLaDAModelLM"))
    if isinstance(changes["architectures"], list) and changes["architectures"][:1] != [
        None
    ]:
        says(line, changes["architectures"])


def test_unknown_architecture_tells_of_the_override(tmp_path, refusal):
    source = Source("sdar")
    source.config["architectures"] = ["Foo"]
    says(refusal(source.write(tmp_path / "src")), ("--family",))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("sdar", "hidden_act", "gelu"),
        ("sdar", "attention_bias", True),
        ("sdar", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("sdar", "use_sliding_window", True),
        ("llada", "block_type", "sequential"),
        ("llada", "activation_type", "swiglu"),
        ("llada", "alibi", True),
        ("llada", "rope", False),
        ("llada", "layer_norm_type", "default"),
        ("llada", "include_bias", True),
        ("llada", "include_qkv_bias", True),
        ("llada", "bias_for_layer_norm", True),
        ("llada", "attention_layer_norm", True),
        ("llada", "input_emb_norm", True),
        ("llada", "scale_logits", True),
    ],
)
def test_unsupported_value(tmp_path, refusal, family, key, value):
    source = Source(family)
    source.config[key] = value
    says(refusal(source.write(tmp_path / "src")), (key, repr(value), family))


REQUIRED = {
    "sdar": [
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
    "llada": [
        "n_layers",
        "d_model",
        "n_heads",
        "mlp_hidden_size",
        "rope_theta",
        "rms_norm_eps",
        "max_sequence_length",
    ],
}


@pytest.mark.parametrize("how", ["absent", "null"])
@pytest.mark.parametrize(
    ("family", "key"), [(family, key) for family in REQUIRED for key in REQUIRED[family]]
)
def test_missing_key(tmp_path, refusal, family, key, how):
    source = Source(family)
    if how == "null":
        source.config[key] = None
    else:
        del source.config[key]
    says(refusal(source.write(tmp_path / "src")), ("lacks", key))


@pytest.mark.parametrize("family", REQUIRED)
def test_all_missing_keys_in_one_message(tmp_path, refusal, family):
    source = Source(family)
    for key in REQUIRED[family]:
        del source.config[key]
    says(refusal(source.write(tmp_path / "src")), REQUIRED[family])


def test_all_faults_of_the_config_in_one_message(tmp_path, refusal):
    source = Source("sdar")
    source.config |= {"hidden_act": "gelu", "attention_bias": True}
    del source.config["rope_theta"]
    line = refusal(source.write(tmp_path / "src"))
    says(line, ("hidden_act", "attention_bias", "rope_theta"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_hidden_layers": 3.0}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": "32"}, "head_dim"),
        ({"vocab_size": [256]}, "vocab_size"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"rms_norm_eps": []}, "rms_norm_eps"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "four"}, "block_size"),
        ({"eos_token_id": "</s>"}, "eos"),
        ({"eos_token_id": [[250]]}, "eos"),
        ({"mask_token_id": 253.5}, "mask"),
    ],
    ids=str,
)
def test_nonsense_value(tmp_path, refusal, changes, word):
    """Values of a wrong type or size, each of which names its key (or our field)."""
    source = Source("sdar")
    source.config |= changes
    says(refusal(source.write(tmp_path / "src")), (word,))


# --- wrong ids ------------------------------------------------------------------------


def test_mask_id_outside_the_vocabulary(tmp_path, refusal):
    """The family's mask id is used where the config is silent; it must exist."""
    source = Source("sdar")
    del source.config["mask_token_id"]
    says(refusal(source.write(tmp_path / "src")), ("mask_id=151669", "256"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": 256}, ("mask_id=256", "vocabulary of 256")),
        ({"mask_token_id": -1}, ("mask_id=-1", "vocabulary")),
        ({"eos_token_id": [250, 256]}, ("eos_ids", "256", "vocabulary")),
        ({"pad_token_id": -1}, ("pad_id=-1", "vocabulary")),
        ({"bos_token_id": 999}, ("bos_id=999", "vocabulary")),
        ({"pad_token_id": 253}, ("mask_id=253", "pad_id=253")),
        ({"eos_token_id": 253}, ("mask_id=253", "eos_ids")),
        ({"eos_token_id": [250, 253]}, ("mask_id=253", "eos_ids")),
    ],
    ids=str,
)
def test_wrong_ids(tmp_path, refusal, changes, words):
    source = Source("sdar")
    source.config |= changes
    says(refusal(source.write(tmp_path / "src")), words)


@pytest.mark.parametrize("special", ["pad_token", "eos_token"])
@pytest.mark.parametrize("form", ["text", "object"])
def test_mask_is_something_else_by_the_tokenizer(tmp_path, refusal, special, form):
    token = "<|MASK|>" if form == "text" else {"content": "<|MASK|>", "special": True}
    source = Source("sdar")
    source.files = tokenizer_files(**{special: token})
    says(refusal(source.write(tmp_path / "src")), ("mask_id=253", special[:3]))


def test_tokenizer_has_another_mask(tmp_path, refusal):
    source = Source("sdar")
    source.files = tokenizer_files(mask_token="<pad>")
    line = refusal(source.write(tmp_path / "src"))
    says(line, ("mask", "253", "251", "config.json", "tokenizer"))


def test_tokenizer_has_another_mask_in_its_decoder_table(tmp_path, refusal):
    """A slow tokenizer: no tokenizer.json, ids in tokenizer_config.json."""
    source = Source("sdar")
    table = {"252": {"content": "<|MASK|>", "special": True}}
    source.files = {
        "tokenizer_config.json": {"mask_token": "<|MASK|>", "added_tokens_decoder": table}
    }
    says(refusal(source.write(tmp_path / "src")), ("253", "252", "tokenizer"))


def test_mask_in_the_plain_vocabulary_is_checked(tmp_path, refusal):
    """A special token need not be among the added ones: the vocabulary has ids too."""
    source = Source("sdar")
    source.files = tokenizer_files(mask_token="w9")
    says(refusal(source.write(tmp_path / "src")), ("253", "9", "tokenizer"))


def test_two_spellings_of_the_mask(tmp_path, success):
    """Published SDAR spells the mask in two ways; the id decides."""
    source = Source("sdar")
    source.files = {
        **tokenizer_files(mask_token="<|MASK|>"),
        "special_tokens_map.json": {"mask_token": "<MASK>"},
        "added_tokens.json": {"<MASK>": 253},
    }
    destination, _ = success(source.write(tmp_path / "src"))
    assert read_sidecar(destination).config.mask_id == 253


# --- wrong destinations ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "full directory", "file", "link"])
def test_destination_exists(tmp_path, refusal, kind):
    destination = tmp_path / "out"
    if kind == "file":
        destination.write_text("mine")
    elif kind == "link":
        (tmp_path / "there").mkdir()
        destination.symlink_to(tmp_path / "there")
    else:
        destination.mkdir()
    if kind == "full directory":
        (destination / "mine").write_text("mine")
    line = refusal(GOLDEN / "sdar")
    says(line, (str(destination.resolve()), "exists", "remove"))


def test_running_twice(tmp_path, success, refusal):
    source = Source("sdar").write(tmp_path / "src")
    destination, _ = success(source)
    says(refusal(source), (str(destination), "exists"))
    assert convert("verify", destination) == 0


def test_destination_is_the_source(tmp_path, refusal):
    source = Source("sdar").write(tmp_path / "src")
    says(refusal(source, destination=source), (str(source), "exists"))


def test_destination_below_a_file(tmp_path, refusal):
    (tmp_path / "file").write_text("mine")
    for destination in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        line = refusal(GOLDEN / "sdar", destination=destination)
        says(line, (str(destination.parent), "writable"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_destination_is_read_only(tmp_path, refusal, monkeypatch, code):
    """Permissions bind no root, so making the directory is made to fail."""

    def refuse(path, *args, **kwargs):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    says(refusal(GOLDEN / "sdar"), (str(tmp_path), os.strerror(code)))


@pytest.mark.parametrize("length", [250, 300])
def test_destination_has_too_long_a_name(tmp_path, refusal, length):
    line = refusal(GOLDEN / "sdar", destination=tmp_path / ("x" * length))
    assert "too long" in line


def test_failure_keeps_no_new_parents(tmp_path, refusal):
    """Directories made on the way to the destination go with it."""
    source = Source("sdar").spoil(DOWN, np.nan).write(tmp_path / "src")
    refusal(source, destination=tmp_path / "new" / "deeper" / "out")


# --- breaking off ---------------------------------------------------------------------

# Where in a conversion something happens, and on which call.
MOMENTS = {
    "reading the first leaf": (HFCheckpoint, "read_leaf", 1),
    "reading a later leaf": (HFCheckpoint, "read_leaf", 5),
    "saving a leaf": (ocp.StandardCheckpointer, "save", 3),
    "waiting for a leaf": (ocp.StandardCheckpointer, "wait_until_finished", 3),
    "copying the tokenizer": (shutil, "copyfile", 2),
    "reading back": (ocp.StandardCheckpointer, "restore", 4),
}


def happens(monkeypatch, moment: str, what) -> list:
    """Calls `what()` once, at a moment of the conversion; the list then has a True."""
    owner, name, count = MOMENTS[moment]
    real, calls, happened = getattr(owner, name), [], []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == count:
            happened.append(True)
            what()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return happened


@pytest.fixture
def with_tokenizer(tmp_path) -> Path:
    source = Source("sdar")
    source.files = tokenizer_files()
    return source.write(tmp_path / "src")


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt(with_tokenizer, refusal, monkeypatch, moment):
    """Ctrl-C at any time: exit code 1, one line, nothing left."""
    happened = happens(monkeypatch, moment, lambda: signal.raise_signal(signal.SIGINT))
    says(refusal(with_tokenizer, code=1), ("interrupted", "nothing was written"))
    assert happened


@pytest.mark.parametrize("moment", MOMENTS)
def test_disk_full(with_tokenizer, tmp_path, refusal, monkeypatch, moment):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    happened = happens(monkeypatch, moment, fail)
    line = refusal(with_tokenizer)
    says(line, (os.strerror(errno.ENOSPC),))
    assert happened
    assert moment == "reading back" or str(tmp_path / "out") in line


def test_file_too_large_for_the_disk(with_tokenizer, tmp_path, refusal):
    """The same from below, where Orbax's threads meet it: a limit on file sizes."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        line = refusal(with_tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    says(line, (str(tmp_path / "out"), "too large"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_unforeseen_error_leaves_nothing(with_tokenizer, tmp_path, monkeypatch, moment):
    def fail():
        raise RuntimeError("unforeseen")

    happened = happens(monkeypatch, moment, fail)
    before = tree(tmp_path)
    try:
        code = convert(with_tokenizer, tmp_path / "out")
    except RuntimeError:
        code = 1  # as the interpreter's
    assert happened
    assert code != 0
    assert tree(tmp_path) == before


def test_wrong_write_is_noticed(tmp_path, refusal, monkeypatch):
    real = ocp.StandardCheckpointer.save

    def save_wrongly(self, path, tree_, *args, **kwargs):
        if path.parent.name == "layers.gate":
            tree_ = {"value": tree_["value"] + np.float32(1e-3)}
        return real(self, path, tree_, *args, **kwargs)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", save_wrongly)
    says(refusal(GOLDEN / "sdar"), ("layers.gate",))


def test_destination_appears_meanwhile(with_tokenizer, tmp_path, capsys, monkeypatch):
    """What another process put there is not overwritten."""
    destination = tmp_path / "out"

    def appear():
        destination.mkdir()
        (destination / "mine").write_text("mine")

    happened = happens(monkeypatch, "reading back", appear)
    assert convert(with_tokenizer, destination) == 2
    err = capsys.readouterr().err
    assert happened
    assert err.startswith("convert: ") and err.count("\n") == 1
    assert str(destination) in err
    assert {path.name for path in tmp_path.iterdir()} == {"src", "out"}
    assert tree(destination) == {"mine": 4}


# --- verify ---------------------------------------------------------------------------


@pytest.fixture
def verify_refusal(copy, capsys):
    """Verifies the spoiled copy, which must fail; returns the one line."""

    def check() -> str:
        before = tree(copy)
        code = convert("verify", copy)
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("convert: ") and err.count("\n") == 1, err
        assert tree(copy) == before
        return err

    return check


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_verify(converted, capsys, family):
    before = tree(converted[family])
    assert convert("verify", converted[family]) == 0
    out, err = capsys.readouterr()
    says(out, (str(converted[family]), family, "float32"))
    assert err == ""
    assert tree(converted[family]) == before


def data_file(directory: Path, leaf: str) -> Path:
    files = [path for path in (directory / "params" / leaf).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _flip_middle(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :]


def _flip_first(data):
    return bytes([data[0] ^ 0x55]) + data[1:]


def _zero(data):
    return bytes(len(data))


def _half(data):
    return data[: len(data) // 2]


def _nothing(data):
    return b""


def _no_file(data):
    return None


DAMAGES = (_flip_middle, _flip_first, _zero, _half, _nothing, _no_file)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("leaf", ["embed", "layers.q", "layers.up"])
def test_verify_damaged_data(copy, verify_refusal, leaf, damage):
    path = data_file(copy, leaf)
    damaged = damage(path.read_bytes())
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    says(verify_refusal(), (str(copy), leaf, "convert"))


def test_verify_names_all_damaged_leaves(copy, verify_refusal):
    for leaf in ("embed", "layers.q", "head"):
        path = data_file(copy, leaf)
        path.write_bytes(_flip_middle(path.read_bytes()))
    says(verify_refusal(), ("embed", "layers.q", "head"))


def test_verify_names_unreadable_and_changed_leaves(copy, verify_refusal):
    path = data_file(copy, "layers.q")
    path.write_bytes(_flip_middle(path.read_bytes()))
    shutil.rmtree(copy / "params" / "layers.up")
    says(verify_refusal(), ("layers.q", "layers.up"))


def test_verify_any_damaged_file(copy, capsys):
    """Each file in turn: noticed in one line, or the values still have their checksum."""
    for path in sorted((copy / "params" / "final_norm").rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        path.write_bytes(_flip_first(data))
        code = convert("verify", copy)
        err = capsys.readouterr().err
        assert (code, err.count("\n")) in ((0, 0), (2, 1)), path
        path.write_bytes(data)
    assert convert("verify", copy) == 0


def test_load_of_damaged_data(copy):
    data_file(copy, "layers.q").unlink()
    with pytest.raises(CheckpointError, match=r"layers\.q"):
        dllm_jax.load(str(copy))


def test_verify_missing_leaf(copy, verify_refusal):
    shutil.rmtree(copy / "params" / "layers.k_norm")
    says(verify_refusal(), (str(copy), "layers.k_norm"))


def test_verify_swapped_leaves(copy, verify_refusal):
    """Keys and values have one shape; only the checksum tells them apart."""
    params = copy / "params"
    (params / "layers.k").rename(params / "spare")
    (params / "layers.v").rename(params / "layers.k")
    (params / "spare").rename(params / "layers.v")
    says(verify_refusal(), ("layers.k", "layers.v"))


def test_verify_missing_tokenizer_file(tmp_path, success, capsys):
    """The sidecar lists the tokenizer's files, so they belong to the checkpoint."""
    source = Source("sdar")
    source.files = tokenizer_files()
    destination, _ = success(source.write(tmp_path / "src"))
    (destination / "tokenizer.json").unlink()
    code = convert("verify", destination)
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    says(err, ("tokenizer.json",))


def _sidecar_config(**changes):
    def change(values):
        values["config"] |= changes

    return change


SIDECARS = {
    "version": (lambda v: v.update(format_version=99), "99"),
    "no version": (lambda v: v.pop("format_version"), "None"),
    "no config": (lambda v: v.pop("config"), "config"),
    "no checksums": (lambda v: v.pop("checksums"), "checksums"),
    "no dtype": (lambda v: v.pop("dtype"), "dtype"),
    "unknown key": (lambda v: v.update(colour="red"), "colour"),
    "unknown dtype": (lambda v: v.update(dtype="float8"), "float8"),
    "other dtype": (lambda v: v.update(dtype="bfloat16"), "embed"),
    "checksum gone": (lambda v: v["checksums"].pop("embed"), "embed"),
    "checksum changed": (lambda v: v["checksums"].update(embed=[1]), "embed"),
    "checksums a list": (lambda v: v.update(checksums=[1]), "checksums"),
    "unknown config key": (_sidecar_config(colour="red"), "colour"),
    "other shape": (_sidecar_config(ffw_dim=64), "layers."),
    "more layers": (_sidecar_config(num_layers=4), "layers."),
    "impossible config": (_sidecar_config(mask_id=256), "256"),
}


@pytest.mark.parametrize("case", SIDECARS)
def test_verify_sidecar(copy, verify_refusal, case):
    change, word = SIDECARS[case]
    values = json.loads((copy / "dllm.json").read_text())
    change(values)
    write_file(copy / "dllm.json", values)
    says(verify_refusal(), (word,))


@pytest.mark.parametrize("text", ["{", "", "[]", None], ids=repr)
def test_verify_broken_sidecar(copy, verify_refusal, text):
    path = copy / "dllm.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    says(verify_refusal(), (str(path),))


def test_verify_something_else(tmp_path, capsys):
    for directory in (tmp_path, tmp_path / "nothing", GOLDEN / "sdar"):
        assert convert("verify", directory) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        says(err, (str(directory), "dllm.json"))
    says(err, ("is a Hugging Face checkpoint, not a converted one",))


def test_converted_already(copy, refusal):
    says(refusal(copy), (str(copy), "converted already"))


def test_verify_says_what_is_in_int8(tmp_path, success, capsys):
    destination, _ = success(GOLDEN / "sdar", "--quant", "int8")
    assert convert("verify", destination) == 0
    says(capsys.readouterr().out, ("float32 and int8, every checksum",))


@pytest.mark.parametrize(
    ("argv", "takes", "not_that"),
    [
        (["--help"], "source destination", "directory destination"),
        (["verify", "--help"], "] directory\n", "destination"),
        (["export", "--help"], "directory destination", "--dtype"),
    ],
)
def test_each_command_has_its_help(capsys, argv, takes, not_that):
    with pytest.raises(SystemExit) as end:
        main(argv)
    out = capsys.readouterr().out
    assert end.value.code == 0 and takes in out and not_that not in out


def test_directory_called_verify(tmp_path, success, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Source("sdar").write(tmp_path / "verify")
    destination, _ = success("verify")
    assert read_sidecar(destination).source == "verify"


# --- the command itself ---------------------------------------------------------------


def command(*argv) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "convert", *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_converts(tmp_path):
    done = command(GOLDEN / "llada", tmp_path / "out", "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    says(done.stdout, ("llada", "float32 -> bfloat16", "verified"))
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_command_refuses(tmp_path):
    source = Source("sdar").spoil(DOWN, np.nan).write(tmp_path / "src")
    done = command(source, tmp_path / "out", "--dtype", "float16")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("convert: ") and done.stderr.count("\n") == 1
    says(done.stderr, (DOWN, "not finite"))
    assert {path.name for path in tmp_path.iterdir()} == {"src"}


@pytest.mark.parametrize("chunk", [None, 2000])
@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "llada", "dream", "llada2"])
def test_export_is_the_source_again(golden_dir, tmp_path, monkeypatch, family, chunk):
    """Every tensor bit for bit, in one file or in several with an index; tokenizer too."""
    if chunk:
        monkeypatch.setattr(dllm_jax.checkpoint, "CHUNK_NUMBERS", chunk)
        monkeypatch.setattr(dllm_jax.hf.export_leaves, "__defaults__", _small_shards())
    more = ["--mask-id", "253"] if family == "llada2" else []
    source, out = golden_dir / family, tmp_path / "out"
    assert main([str(source), str(tmp_path / "orbax"), *more]) == 0
    assert main(["export", str(tmp_path / "orbax"), str(out)]) == 0
    want, got = (_tensors(directory) for directory in (source, out))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(
            got[name].view(np.uint8), value.view(np.uint8), err_msg=name
        )
    assert (len(list(out.glob("*.safetensors"))) > 1) == bool(chunk)
    assert (out / "model.safetensors.index.json").exists() == bool(chunk)
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    (tmp_path / "usual").touch()
    assert modes == {(tmp_path / "usual").stat().st_mode & 0o777}
    # What was exported converts to the same checkpoint.
    assert main([str(out), str(tmp_path / "again"), *more]) == 0
    one, two = (read_sidecar(tmp_path / name) for name in ("orbax", "again"))
    assert one.checksums == two.checksums
    assert main(["export", str(tmp_path / "orbax"), str(out)]) == 2
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "orbax")])
    assert end.value.code == 2
    assert main(["export", str(source), str(tmp_path / "other")]) == 2


def _small_shards() -> tuple:
    defaults = dllm_jax.hf.export_leaves.__defaults__
    return tuple(20_000 if d == dllm_jax.hf.SHARD_BYTES else d for d in defaults)


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in directory.glob("model*.safetensors"):
        found |= load_file(file)
    return found
