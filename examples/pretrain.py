"""Train a small Mixture-of-Experts language model on the bytes of text files.

    python examples/pretrain.py                              the Python standard library, about five minutes
    python examples/pretrain.py --data notes/ 'src/**/*.c'   files, folders and patterns
    python examples/pretrain.py --resume                     continue from the checkpoint in --out
    python examples/pretrain.py --optimizer muon --out runs/muon --beside runs/pretrain   two curves in one picture
    torchrun --nproc-per-node 4 examples/pretrain.py --mesh fsdp=2,expert=2 --rules shard-exp-on-fsdp
    torchrun --nproc-per-node 4 examples/pretrain.py --mesh stage=2,expert=2 --schedule 1f1b --num-micro-batches 4

The checkpoint and two pictures, loss.png and expert_load.png, are written to the folder --out, in which only
one run can write at a time. Ctrl-C finishes the step and saves. A resumed run gives bit for bit the results of
an uninterrupted run.

Under torchrun the model and every batch are sharded as --mesh and --rules say; the results equal the results of one
process, up to rounding. An axis stage in --mesh cuts the model into pipeline stages. They take a batch in
micro-batches, which change no result, because the load balance loss is computed for each sequence. With a loss over
the whole batch (load_balance_scope="batch"), it would be computed for each micro-batch.
A checkpoint can be loaded on any mesh, with any number of ranks and stages and any --dispatch.
When a rank dies, hangs or raises an error, all other ranks end with an error that names it.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import get_args

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported: docs/how_to/busy_machine.md

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from maxmoe.costs.estimate import Optimizer
from maxmoe.parallel import Dispatch, watch_ranks
from pretraining import InputError, checkpoint, figures, ranks
from pretraining.baselines import bigram_bits_per_byte, zlib_bits_per_byte
from pretraining.command import (
    LARGEST_DEPTH,
    LARGEST_SEED,
    HelpFormatter,
    StopRequest,
    at_least,
    exit_status,
    prepare_output,
)
from pretraining.corpus import Corpus, load_corpus
from pretraining.integrity import TRAINING, compare, read_training
from pretraining.trainer import Trainer

Curves = dict[str, list[tuple[int, float]]]

LEARNING_RATES = {"adamw": 3e-3, "muon": 1e-2}
SAMPLE_PROMPT_BYTES, SAMPLE_BYTES = 64, 256
PICTURES = ("loss.png", "expert_load.png")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    of_each = ", ".join(f"{rate} with {name}" for name, rate in LEARNING_RATES.items())
    add = parser.add_argument
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/pretrain"), help="folder of the results")
    add("--beside", type=Path, help="--out of another run on the same text, whose curve is drawn in loss.png too")
    add("--resume", action="store_true", help="continue the run in --out; same options, but --steps may grow")
    add("--mesh", default="fsdp=-1", help="under torchrun: axes and sizes; -1 takes the remaining ranks")
    add("--rules", default="default", help="preset or YAML file that maps logical dims to mesh axes")
    add("--dispatch", choices=get_args(Dispatch), default="auto", help="how tokens reach experts on other ranks")
    add("--num-chunks", type=at_least(1), default=1, help="parts of the tokens; one is sent while one is computed")
    add("--schedule", help="with stage in --mesh: gpipe, 1f1b, interleaved_1f1b, zbv, ... (default: 1f1b)")
    add("--num-micro-batches", type=at_least(1), help="with stage in --mesh: parts of a batch in the pipeline")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the matrix products")
    add("--optimizer", choices=get_args(Optimizer), default="adamw", help="muon: for the matrices of blocks only")
    add("--learning-rate", type=at_least(0, float), help=f"peak learning rate (default: {of_each})")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="seed of parameters and data order")
    add("--steps", type=at_least(1), help="optimizer steps (default: 1600, with --resume the run's)")
    add("--batch-size", type=at_least(1), default=8, help="sequences per step")
    add("--sequence-length", type=at_least(1), default=256, help="bytes per sequence")
    add("--eval-every", type=at_least(1), default=200, help="steps from one evaluation to the next")
    add("--save-every", type=at_least(1), default=200, help="steps from one checkpoint to the next")
    add("--hidden-size", type=at_least(1), default=128, help="width of the model")
    add(
        "--num-layers",
        type=at_least(1, at_most=LARGEST_DEPTH),
        default=4,
        help="blocks, each with a Mixture-of-Experts layer",
    )
    add("--num-heads", type=at_least(1), default=2, help="attention heads per block")
    add("--num-experts", type=at_least(1), default=16, help="experts per block")
    add("--top-k", type=at_least(1), default=2, help="experts per byte")
    add("--intermediate-size", type=at_least(1), default=128, help="width inside each expert")
    options = parser.parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    return options


def curves_beside(options: argparse.Namespace, corpus: Corpus) -> Curves:
    """Return the held-out curve of the run in --beside, by its label in the picture."""
    if options.beside is None:
        return {}
    folder = options.beside / "checkpoint"
    comparable = {"data": corpus.fingerprint, "sequence_length": options.sequence_length}
    with checkpoint.readable_errors(f"cannot read the checkpoint {folder}"):
        there = read_training(folder / TRAINING)
        if not there["held_out"]:
            raise ValueError("the run has not been evaluated yet")
        compare(folder, there["configuration"], comparable)
    return {f"held-out text of {options.beside}": there["held_out"]}


def train(trainer: Trainer, baselines: dict[str, float]) -> int:
    """Take the remaining steps, evaluate and save; return the number of the signal that stopped the run, or 0."""
    options = trainer.options
    against = ", ".join(f"{name} {value:.3f}" for name, value in baselines.items())
    bytes_per_step = options.batch_size * options.sequence_length
    progress = tqdm(
        total=trainer.steps * bytes_per_step,
        initial=trainer.step * bytes_per_step,
        unit=" tokens",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5,
    )
    with progress, StopRequest() as stop:
        stopped_by = 0
        while trainer.step < trainer.steps and not stopped_by:
            layers = trainer.train_step().layers
            load = max(float(stats.load_max_over_mean) for stats in layers.values())
            bits = trainer.history.training[-1]
            status = f"step {trainer.step}, {bits:.3f} bits, busiest expert {load:.1f} x the mean"
            progress.set_postfix_str(status, refresh=False)
            progress.update(bytes_per_step)
            last = trainer.step == trainer.steps
            if last or trainer.step % options.eval_every == 0:
                bits = trainer.evaluate()
                progress.write(f"step {trainer.step}: {bits:.3f} bits per byte on held-out text ({against})")
            stopped_by = ranks.largest(stop.signal or 0)  # all ranks stop after the same step
            if last or trainer.step % options.save_every == 0 or stopped_by:
                trainer.save()
    return stopped_by


def report(trainer: Trainer, baselines: dict[str, float], others: Curves) -> None:
    """Print a sample and the result, and draw the pictures."""
    history, out = trainer.history, trainer.options.out
    if not history.held_out or history.held_out[-1][0] != trainer.step:  # the run was shortened with --steps
        trainer.evaluate()
    sample = trainer.sample(SAMPLE_PROMPT_BYTES, SAMPLE_BYTES)
    if sample is None:
        print("\nNo sample: no rank has the whole model. --resume on a mesh without stages prints one.\n")
    else:
        print(f"\nSample, after {SAMPLE_PROMPT_BYTES} held-out bytes:\n{sample}\n")
    print(f"{history.held_out[-1][1]:.3f} bits per byte on held-out text")
    for name, value in baselines.items():
        print(f"{value:.3f} with {name}")
    # Two windows, because the last one may have a single step.
    first = max(-(-trainer.step // history.load.window) - 2, 0)
    last = torch.stack([counts[first:].sum(0) for counts in history.load.tokens_per_expert.values()])
    steps = trainer.step - history.load.window * first
    print(f"{int((last == 0).sum())} of {last.numel()} experts got no token in the last {steps} steps together")
    loss, expert_load = (out / name for name in PICTURES)
    with ranks.agreed():
        if ranks.is_first():
            draw(loss, expert_load, trainer, baselines, others)
    print("Pictures:", loss, expert_load)


def draw(loss: Path, expert_load: Path, trainer: Trainer, baselines: dict[str, float], others: Curves) -> None:
    """Write the pictures."""
    history = trainer.history
    held_out = {f"held-out text, {trainer.options.optimizer}": history.held_out, **others}
    try:
        figures.loss_curves(loss, history.training, held_out, baselines)
        figures.save(history.load.heat_map(), expert_load)
    except OSError as error:
        raise InputError(f"cannot write the pictures to {loss.parent}: {error.strerror}") from error


def run(options: argparse.Namespace, command: list[str]) -> int:
    """Build the trainer, lock the output folder and train; return the exit status."""
    with watch_ranks(ranks.PATIENCE.total_seconds()):
        with ranks.agreed():
            corpus = load_corpus(options.data, options.sequence_length)
        others = curves_beside(options, corpus)
        print(f"Text: {corpus.description}")
        trainer = Trainer(options, corpus)
        print(f"Model: {trainer.num_parameters:,} parameters")
        with ranks.agreed():
            if options.resume:
                checkpoint.find(trainer.checkpoint)
            prepare_output(options.out, *PICTURES)
        with ranks.locked(options.out):
            return pretrain(trainer, others, command)


def pretrain(trainer: Trainer, others: Curves, command: list[str]) -> int:
    """Train from the start or from the checkpoint, then report; return the exit status."""
    options, corpus = trainer.options, trainer.corpus
    baselines = {
        "byte bigram": bigram_bits_per_byte(corpus.training, corpus.held_out),
        "zlib -9": zlib_bits_per_byte(corpus.held_out),
    }
    with ranks.agreed():
        checkpoint.prepare(trainer.checkpoint)
    if options.resume:
        trainer.resume()
        print(f"Resumed at step {trainer.step} of {trainer.steps}")
    elif trainer.checkpoint.exists():
        print(f"The first save replaces the checkpoint in {options.out}; --resume would continue it")
    stopped_by = train(trainer, baselines)
    if stopped_by:
        again = [*command, *([] if options.resume else ["--resume"])]
        print(f"Stopped and saved at step {trainer.step}. To continue: {shlex.join(again)}")
        return 128 + stopped_by
    report(trainer, baselines, others)
    return 0


@record  # torchrun then reports the error of a rank
def main() -> int:
    """Run the command line."""
    with ranks.joined():
        return exit_status("pretrain", lambda: run(parse_options(), ranks.command()))


if __name__ == "__main__":
    sys.exit(main())
