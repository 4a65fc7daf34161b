"""From what a user typed to a decoder's resolved settings, before any weight is loaded."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from dllm_jax.config import ModelConfig
from dllm_jax.decoding import DECODERS, Decoder
from dllm_jax.models import FAMILIES


def setting_fields(decoder: Decoder) -> dict[str, dataclasses.Field]:
    """The settings of a decoder that a user may give, by name."""
    return {
        field.name: field
        for field in dataclasses.fields(decoder.settings)
        if "help" in field.metadata
    }


def presets() -> dict[str, dict[str, Any]]:
    """Decoder and settings of every preset, by name."""
    found = [preset for family in FAMILIES.values() for preset in family.presets.items()]
    return {name: dict(preset) for name, preset in sorted(found, key=lambda p: p[0])}


def find_preset(name: str) -> dict[str, Any]:
    """The decoder and settings of a preset; raises ValueError with the known names."""
    known = presets()
    if name not in known:
        raise ValueError(f"preset={name!r} must be one of {', '.join(known)}.")
    return known[name]


def find_decoder(name: str) -> Decoder:
    """A registered decoder; raises ValueError with the known names."""
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r} must be one of {', '.join(DECODERS)}.")
    return DECODERS[name]


def default_decoder(config: ModelConfig) -> str:
    """The decoder that a model is made for."""
    if config.attention == "bidirectional":
        return "masked"
    return "block" if config.logit_alignment == "same" else "fast_dllm_v2"


def canonical_names(decoder: Decoder, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their own names; raises ValueError for unknown or doubled ones."""
    fields = setting_fields(decoder)
    names = {name: name for name in fields}
    for name, field in fields.items():
        names |= {alias: name for alias in field.metadata["aliases"]}
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {names[close[0]]}?" if close else ""
            others = ", ".join(d.name for d in DECODERS.values() if _takes(d, name))
            if others:
                hint = f" Decoders that have it: {others}."
            raise ValueError(
                f"{name}={value!r} is no setting of decoder {decoder.name!r}; it takes "
                f"{', '.join(fields)}.{hint}"
            )
        if names[name] in out:
            raise ValueError(f"{names[name]} is given twice, once as an alias.")
        out[names[name]] = value
    return out


def _takes(decoder: Decoder, name: str) -> bool:
    fields = setting_fields(decoder)
    return name in fields or any(name in f.metadata["aliases"] for f in fields.values())


def decoders_for(config: ModelConfig) -> list[str]:
    """The decoders that a model can be decoded with, by their default settings."""

    def suits(decoder: Decoder) -> bool:
        try:
            decoder.resolve(decoder.settings(), config)
        except ValueError:
            return False
        return True

    return [name for name, decoder in DECODERS.items() if suits(decoder)]


def _checked(field: dataclasses.Field, value: Any) -> Any:
    kind = field.metadata["kind"]
    if value is None:
        return field.default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)
    if kind is int and number and math.isfinite(value) and int(value) == value:
        if abs(value) >= 2**31:
            raise ValueError(f"{field.name}={value!r} must be below 2**31.")
        return int(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError(f"{field.name}={value!r} must be of type {kind.__name__}.")


def resolve_settings(
    decoder: Decoder, config: ModelConfig, given: Mapping[str, Any]
) -> Any:
    """The decoder's settings, complete and checked.

    Args:
      decoder: from `find_decoder`.
      config: the model that is to decode.
      given: settings by name or alias; None means the default.

    Raises:
      ValueError: in one line, naming the setting, its value and what is allowed.
    """
    fields = setting_fields(decoder)
    values = {
        name: _checked(fields[name], value)
        for name, value in canonical_names(decoder, given).items()
    }
    try:
        return decoder.resolve(decoder.settings(**values), config)
    except ValueError as error:
        known = decoders_for(config)
        hint = "" if decoder.name in known else f" Those that fit it: {', '.join(known)}."
        raise ValueError(f"decoder {decoder.name!r}: {error}{hint}") from None


def describe_settings(settings: Any) -> dict[str, Any]:
    """The resolved settings for printing."""
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if "help" in field.metadata
    }


def traced_settings(settings: Any) -> Any:
    """The settings with traced values as arrays, so that every value is one trace."""

    dtypes = {int: jnp.int32, float: jnp.float32, bool: jnp.bool_}

    def convert(field: dataclasses.Field) -> Any:
        value = getattr(settings, field.name)
        kind = field.metadata["kind"]
        return jnp.asarray(value, dtypes[kind])

    return settings.replace(
        **{
            field.name: convert(field)
            for field in dataclasses.fields(settings)
            if field.metadata.get("pytree_node", True)
        }
    )
