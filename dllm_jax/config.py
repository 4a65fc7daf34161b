"""What a model is: sizes, switches and special ids, independent of where it came from."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

_SIZES = (
    "vocab_size",
    "num_layers",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffw_dim",
    "max_positions",
    "block_length",
)
_MOE_SIZES = ("num_experts", "experts_per_token", "ffw_dim", "num_groups")
_MOE_SIZES += ("groups_per_token",)
_MOST, _MOST_FLOAT = 2**31, 1e38  # what int32 and float32 do not hold
_FLOATS = ("rope_theta", "norm_eps", "rotary_fraction", "scale")
_SWITCHES = ("tied_head", "normalise", "selection_bias")


def _check_sizes(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value < _MOST:
            raise ValueError(
                f"{name}={value!r} must be a whole number of at least 1, below 2**31."
            )


def _wrong_kind(field: str, value: Any) -> str | None:
    """What a published value ought to be, or None if it is that."""
    number = type(value) in (int, float)
    if field in _SWITCHES:
        return None if type(value) is bool else "true or false"
    if field in _FLOATS:
        return None if number and 0 < value < _MOST_FLOAT else "a number above 0"
    if field == "mask_id":  # its range is the vocabulary, checked by the config
        return None if type(value) is int else "a whole number"
    least = 1 if field in _SIZES else 0
    right = type(value) is int and least <= value < _MOST
    return None if right else f"a whole number of at least {least}, below 2**31"


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward network. Hashable."""

    num_experts: int
    experts_per_token: int
    ffw_dim: int  # of one expert
    shared_ffw_dim: int = 0  # of the expert that every token takes; 0: there is none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # chosen weights are divided by their sum
    scale: float = 1.0  # of the routed experts' output
    num_groups: int = 1  # experts come in contiguous groups, ...
    groups_per_token: int = 1  # ... of which only the best so many are eligible
    selection_bias: bool = False  # a bias that counts for the choice, not for the weight

    def __post_init__(self):
        _check_sizes(self, _MOE_SIZES)
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} is not a multiple of "
                f"num_groups={self.num_groups}."
            )
        eligible = self.num_experts // self.num_groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= eligible:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be in [1, {eligible}]."
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer that predicts masked tokens. Hashable, so jit-static.

    The core knows no family names: whatever distinguishes families is a field here.
    """

    vocab_size: int  # rows of the embedding table and columns of the head
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffw_dim: int
    rope_theta: float
    norm_eps: float
    max_positions: int  # longest canvas (prompt and generated tokens) that it was made for

    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before RoPE
    qkv_bias: bool = False  # biases on the query, key and value projections
    rotary_fraction: float = 1.0  # leading share of head_dim that RoPE rotates
    moe: MoEConfig | None = None  # of all layers but the first `dense_layers`
    dense_layers: int = 0  # leading layers with an ordinary network, where there is moe
    tied_head: bool = False  # the head is the embedding table
    attention: Literal["block_causal", "bidirectional"] = "block_causal"
    logit_alignment: Literal["same", "shifted"] = "same"  # logits at p predict p, or p + 1
    block_length: int = 1  # the block length it was trained with

    mask_id: int = 0
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None

    def __post_init__(self):
        _check_sizes(self, _SIZES)
        if not 0 <= self.dense_layers < self.num_layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} must be in [0, {self.num_layers})."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        ids = {"mask_id": self.mask_id, "pad_id": self.pad_id, "bos_id": self.bos_id}
        ids |= {f"eos_ids[{i}]": eos for i, eos in enumerate(self.eos_ids)}
        for name, value in ids.items():
            if value is not None and type(value) is not int:
                raise ValueError(f"{name}={value!r} must be a whole number.")
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name}={value} is outside the vocabulary of {self.vocab_size}."
                )
        if self.mask_id == self.pad_id or self.mask_id in self.eos_ids:
            raise ValueError(
                f"mask_id={self.mask_id} must differ from pad_id={self.pad_id} "
                f"and from eos_ids={self.eos_ids}."
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` gives the config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Rebuilds a config from `to_dict`; raises ValueError for unknown keys."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown model config keys {unknown}.")
        moe = values.get("moe")
        return cls(
            **{
                **values,
                "eos_ids": tuple(values.get("eos_ids", ())),
                "moe": None if moe is None else MoEConfig(**moe),
            }
        )

    @classmethod
    def from_hf(
        cls,
        hf: Mapping[str, Any],
        family: "Family",
        generation: Mapping[str, Any] | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        name: str = "",
        mask_id: int | None = None,
    ) -> "ModelConfig":
        """Reads a Hugging Face `config.json`.

        Args:
          hf: the parsed config.json.
          family: the data of the model's family (`dllm_jax.models.resolve_family`).
          generation: the parsed generation_config.json, if any.
          tokenizer: `{"eos_id": .., "pad_id": .., "bos_id": .., "mask_id": ..}` as the
            tokenizer has them, if known.
          name: what the checkpoint is called; some families tell the block length only
            there, as in `-b16`. After it counts the config's own `_name_or_path`.
          mask_id: overrides what the files and the family say.

        Returns:
          The config. End-of-sequence ids are the union of all three sources.

        Raises:
          ValueError: all missing keys, and all values that are no numbers or that this
            library does not implement, in one line.
        """
        generation, tokenizer = generation or {}, tokenizer or {}
        problems = [
            f"config.json has {key}={hf[key]!r}; {family.name} checkpoints are supported "
            f"with {' or '.join(repr(value) for value in allowed)} only"
            for key, allowed in family.supported.items()
            if key in hf and hf[key] not in allowed
        ]
        missing: list[str] = []

        def read(table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
            found = {}
            for field, keys in table.items():
                given = [key for key in keys if hf.get(key) is not None]
                if given:
                    found[field] = hf[given[0]]
                    wanted = _wrong_kind(field, found[field])
                    if wanted:
                        problems.append(
                            f"config.json has {given[0]}={found[field]!r}, which must be "
                            f"{wanted}"
                        )
                elif field in family.defaults:
                    found[field] = family.defaults[field]
                else:
                    missing.append(" or ".join(keys))
            return found

        values: dict[str, Any] = {**family.fixed, **read(family.config_keys)}
        moe = {**family.moe_fixed, **read(family.moe_keys)}
        if missing:
            problems.append(f"config.json lacks {', '.join(missing)}")
        if problems:
            raise ValueError(f"{'. '.join(problems)}.")
        if moe:
            # Published as a number of shared experts, each as wide as a routed one.
            moe["shared_ffw_dim"] = moe.pop("shared_experts", 0) * moe["ffw_dim"]
            values["moe"] = MoEConfig(**moe)
        if values.get("num_kv_heads") is None:
            values["num_kv_heads"] = values["num_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = values["embed_dim"] // values["num_heads"]
        if hf.get(family.block_length_key) is None:
            names = (name, str(hf.get("_name_or_path")))
            suffixes = [re.search(r"-b([1-9]\d*)/*$", text) for text in names]
            lengths = [int(found[1]) for found in suffixes if found]
            values["block_length"] = (lengths or [values["block_length"]])[0]

        eos: list[int] = []
        for source in (generation, hf, {"eos_token_id": tokenizer.get("eos_id")}):
            stop = source.get("eos_token_id")
            eos += stop if isinstance(stop, list) else [] if stop is None else [stop]
        values["eos_ids"] = tuple(dict.fromkeys([*eos, *family.extra_eos_ids(values)]))
        for field in ("pad_id", "bos_id"):
            key = field.replace("_id", "_token_id")
            for source in (hf.get(key), generation.get(key), tokenizer.get(field)):
                if source is not None and field not in values:
                    values[field] = source
        values["rope_theta"] = float(values["rope_theta"])
        values["norm_eps"] = float(values["norm_eps"])
        told = tokenizer.get("mask_id")
        if mask_id is not None:
            values["mask_id"] = mask_id
        elif told is not None and told != values["mask_id"]:
            raise ValueError(
                f"the mask id is {values['mask_id']} by config.json or family but "
                f"{told} by the tokenizer: choose one with mask_id."
            )
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family as data: how its checkpoints spell what the core implements.

    A source tensor is transposed unless its leaf is in `untransposed` or it is a vector:
    published matrices are [out, in], ours [in, out]. Leaves with the same pattern are
    stored in one tensor, below each other in the order of our tree (fused projections).
    """

    name: str
    architectures: tuple[str, ...]  # as in config.json
    model_types: tuple[str, ...]  # as in config.json
    config_keys: Mapping[str, tuple[str, ...]]  # our field -> their keys, first found wins
    defaults: Mapping[str, Any]  # our field -> value where the checkpoint is silent
    fixed: Mapping[str, Any]  # our field -> value that every member of the family has
    supported: Mapping[str, tuple[Any, ...]]  # their key -> values that we implement
    tensors: Mapping[str, str]  # our leaf ("layers.q") -> their name, {layer}, {expert}
    untransposed: tuple[str, ...] = ("embed",)
    moe_keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    moe_fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    block_length_key: str = "block_size"
    eos_token_ids: tuple[int, ...] = ()  # stop ids that no published file lists
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def extra_eos_ids(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The family's own stop ids that exist in a vocabulary of this size."""
        return tuple(i for i in self.eos_token_ids if i < values["vocab_size"])
