"""The training loop: optax updates, Orbax checkpoints, resume."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from tokenizers import Tokenizer

from dllm_jax.config import ModelConfig
from dllm_jax.params import Params, init_params
from dllm_jax.sharding import param_shardings, place
from dllm_jax.training.batches import problem_batches
from dllm_jax.training.demo import Recipe
from dllm_jax.training.losses import block_diffusion_loss, masked_diffusion_loss


@struct.dataclass
class TrainState:
    """Everything that a checkpoint holds."""

    params: Params
    opt_state: Any
    step: jax.Array  # int32, updates done


@functools.cache
def make_optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """Muon for the stacked matrices of the layers, Adam for the rest."""

    def schedule(peak):
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, min(100, steps // 10 + 1)),
                optax.linear_schedule(peak, 0.02 * peak, steps),
            ],
            [min(100, steps // 10 + 1)],
        )

    def dimensions(params):
        matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(lambda leaf: matrix if leaf.ndim == 3 else None, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(recipe.learning_rate),
            adam_learning_rate=schedule(recipe.adam_learning_rate),
            weight_decay=0.01,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


@functools.cache
def make_update(
    config: ModelConfig, optimizer: optax.GradientTransformation, loss: str, window: int
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """One jitted update `(state, batch, rng_key) -> (state, loss)`; the state is donated.

    Args:
      config: the model.
      optimizer: as from `make_optimizer`.
      loss: "block" or "masked".
      window: positions noised by the block loss.
    """
    if loss == "block":
        loss_fn = functools.partial(block_diffusion_loss, window=window)
    elif loss == "masked":
        loss_fn = masked_diffusion_loss
    else:
        raise ValueError(f"{loss=} must be 'block' or 'masked'.")

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, batch, rng_key):
        value, grads = jax.value_and_grad(
            lambda params: loss_fn(params, config, batch, rng_key)
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), value

    return update


def train(
    recipe: Recipe,
    tokenizer: Tokenizer,
    checkpoint_dir: Path,
    steps: int | None = None,
    checkpoint_every: int = 200,
    report: Callable[[str], None] = print,
    mesh: Mesh | None = None,
) -> Params:
    """Trains a demo model, from the newest checkpoint in `checkpoint_dir` if there is one.

    Args:
      recipe: the model and its stages.
      tokenizer: its tokenizer.
      checkpoint_dir: Orbax checkpoints go here; the last two are kept.
      steps: updates in all, `recipe.steps` if None.
      checkpoint_every: updates between checkpoints.
      report: receives a line of progress now and then.
      mesh: of `sharding.make_mesh`; parameters and the optimizer's state lie on it by the
        rules of `sharding`, rows of a batch along "data", and XLA divides the work.

    Returns:
      The trained parameters, float32.
    """
    steps = recipe.steps if steps is None else steps
    config = recipe.config(tokenizer.get_vocab_size())
    optimizer = make_optimizer(recipe, steps)
    rng_key = jax.random.key(recipe.seed)
    params = init_params(config, jax.random.fold_in(rng_key, 2**31 - 1))
    if mesh is not None:
        params = jax.device_put(params, param_shardings(config, mesh))
    # Compiled, so that moments lie where their parameters do.
    opt_state = jax.jit(optimizer.init)(params)
    step = place(mesh, jnp.int32(0), PartitionSpec())
    state = TrainState(params, opt_state, step)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, save_interval_steps=checkpoint_every
    )
    with ocp.CheckpointManager(checkpoint_dir.resolve(), options=options) as manager:
        if manager.latest_step() is not None:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(
                manager.latest_step(), args=ocp.args.StandardRestore(shapes)
            )
            report(f"resumed at step {int(state.step)}")
        begin = 0
        for stage_index, stage in enumerate(recipe.stages):
            last = stage_index == len(recipe.stages) - 1
            end = steps if last else begin + round(stage.share * steps)
            first = max(begin, int(state.step))
            # A resumed stage goes on in its own stream of data.
            batches = problem_batches(
                tokenizer, recipe.batch_size, stage.block_lengths, seed=stage_index + 1
            )
            batches = itertools.islice(batches, first - begin, max(end, first) - begin)
            started, losses = time.perf_counter(), []
            for step, (batch, window) in enumerate(batches, start=first):
                update = make_update(config, optimizer, stage.loss, window)
                key = place(mesh, jax.random.fold_in(rng_key, step), PartitionSpec())
                batch = place(mesh, batch, PartitionSpec("data"))
                # A mesh that is set keeps the kernel away, which XLA cannot divide.
                with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                    state, loss = update(state, batch, key)
                losses.append(float(loss))
                if (step + 1) % 50 == 0:
                    speed = len(losses) * recipe.batch_size
                    speed /= time.perf_counter() - started
                    mean = sum(losses) / len(losses)
                    report(
                        f"step {step + 1}/{steps} {stage.loss} loss {mean:.4f} "
                        f"{speed:.0f} rows/s"
                    )
                    started, losses = time.perf_counter(), []
                last_step = step + 1 == steps
                if last_step or manager.should_save(step + 1):
                    saved = ocp.args.StandardSave(state)
                    manager.save(step + 1, args=saved, force=last_step)
            begin = end
        manager.wait_until_finished()
    return state.params
