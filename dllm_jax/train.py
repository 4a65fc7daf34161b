"""`python -m dllm_jax.train demo`: trains a demo model and writes it in HF layout."""

import argparse
import sys
from pathlib import Path

from dllm_jax.hf import export_hf
from dllm_jax.sharding import make_mesh
from dllm_jax.training.demo import RECIPES
from dllm_jax.training.trainer import train
from dllm_jax.training.vocabulary import save_tokenizer, train_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dllm_jax.train", description="Train a demo model on CPU."
    )
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("checkpoints"),
        help="training checkpoints; an interrupted run goes on from here",
    )
    parser.add_argument("--steps", type=int, help="updates, instead of the recipe's")
    parser.add_argument(
        "--output", type=Path, help="directory of the trained model, HF layout"
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,..",
        help="divide over several devices, as of dllm_jax.decode (default: one device)",
    )
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps} must be at least 1")
    recipe = RECIPES[args.model]
    try:
        mesh = make_mesh(args.mesh)
        if mesh is not None and recipe.batch_size % mesh.shape["data"]:
            raise ValueError(f"{recipe.batch_size} rows do not divide over {args.mesh!r}.")
    except ValueError as error:
        parser.error(str(error))
    tokenizer = train_tokenizer()
    params = train(
        recipe,
        tokenizer,
        args.checkpoints / args.model,
        steps=args.steps,
        mesh=mesh,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    output = args.output or args.checkpoints / f"{args.model}-hf"
    config = recipe.config(tokenizer.get_vocab_size())
    export_hf(params, config, recipe.family, output)
    save_tokenizer(tokenizer, output)
    print(f"wrote {output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
