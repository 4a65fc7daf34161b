"""Recipes of the demo models: what they are and how each is trained."""

import dataclasses

from dllm_jax.config import ModelConfig
from dllm_jax.training.vocabulary import EOS, MASK, PAD, SPECIAL_TOKENS


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training with one loss."""

    loss: str  # "block" (block diffusion) or "masked" (masked diffusion)
    share: float  # of all steps
    block_lengths: tuple[int, ...] = (1,)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A demo model and its training."""

    family: str
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    ffw_dim: int
    stages: tuple[Stage, ...]
    steps: int
    batch_size: int = 32
    learning_rate: float = 1e-2  # of Muon; embeddings, head and norms use Adam
    adam_learning_rate: float = 3e-3
    head_dim: int = 32
    seed: int = 0

    def config(self, vocab_size: int) -> ModelConfig:
        """The model's configuration for a vocabulary of this size."""
        ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
        bidirectional = self.family == "llada"
        return ModelConfig(
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffw_dim=self.ffw_dim,
            rope_theta=10000.0,
            norm_eps=1e-6,
            max_positions=256,
            qk_norm=not bidirectional,
            attention="bidirectional" if bidirectional else "block_causal",
            block_length=32 if bidirectional else 8,
            mask_id=ids[MASK],
            eos_ids=(ids[EOS], ids[PAD]),
            pad_id=ids[PAD],
            bos_id=ids[PAD],
        )


# Autoregression in place first (every block has one token), then blocks of every length.
_AR = Stage("block", 0.35)
_BLOCKS = Stage("block", 0.65, (1, 1, 2, 4, 4, 8, 8, 16, 32))
_LLADA = (Stage("block", 0.2), Stage("masked", 0.8))

RECIPES = {
    "demo": Recipe("sdar", 6, 128, 4, 2, 352, (_AR, _BLOCKS), steps=1300),
    "demo-draft": Recipe("sdar", 2, 96, 3, 1, 256, (_AR, _BLOCKS), steps=700),
    "demo-llada": Recipe("llada", 6, 128, 4, 4, 352, _LLADA, steps=3500),
}
