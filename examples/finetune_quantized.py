"""Train adapters of PEFT beside all experts of gpt-oss, which stay in MXFP4 as they are published.

    python examples/finetune_quantized.py                           a small model with random weights, a minute
    python examples/finetune_quantized.py --data notes/             on other text than the Python standard library
    python examples/finetune_quantized.py --checkpoint gpt-oss-20b  the published files, in a folder: 17 GB of memory
    python examples/finetune_quantized.py --preset gpt_oss_20b      random weights of the same sizes
    python examples/finetune_quantized.py --resume                  continue from the checkpoint in --out

The experts are never expanded: every step reads their codes of 4 bits. The progress bar shows the loss, tokens per
second and the peak of the resident memory. --experts bfloat16 holds the same weights expanded and has the same losses.

The checkpoint in --out contains the adapters and the state of their optimizer. Ctrl-C finishes the step and saves. A
resumed run gives bit for bit the results of an uninterrupted one. At the end, the adapters are written to the folder
adapters, from which PEFT loads them. With --checkpoint, the text is tokenized by its tokenizer.json; else each byte is
a token.
"""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from finetuning.adapter_training import DEFAULT_STEPS, AdapterTraining
from finetuning.models import with_adapters
from finetuning.quantized_models import (
    PRESETS,
    checkpoint_config,
    dequantize_experts,
    expert_bytes,
    published_model,
    random_config,
    random_model,
)
from finetuning.token_text import load_text
from finetuning.training import status
from pretraining import checkpoint
from pretraining.command import (
    LARGEST_DEPTH,
    LARGEST_SEED,
    HelpFormatter,
    StopRequest,
    at_least,
    exit_status,
    prepare_output,
)
from pretraining.ranks import command, locked

MB, GB = 1e6, 1e9


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--preset", choices=PRESETS, default="small", help="sizes of a model with random weights")
    weights.add_argument("--checkpoint", type=Path, help="folder with config.json and safetensors of gpt-oss")
    add("--num-layers", type=at_least(1, at_most=LARGEST_DEPTH), help="blocks (default: the model's)")
    add("--experts", choices=["mxfp4", "bfloat16"], default="mxfp4", help="bfloat16: the same values, expanded")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/quantized"), help="folder of the results")
    add("--resume", action="store_true", help="continue the run in --out; same options, but --steps may grow")
    add("--learning-rate", type=at_least(0, float), default=1e-3, help="at its peak")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--threads", type=at_least(1, at_most=1024), default=os.cpu_count(), help="to compute with")
    steps = f"optimizer steps (default: {DEFAULT_STEPS}, with --resume the run's)"
    add("--steps", type=at_least(1), help=steps)
    add("--save-every", type=at_least(1), default=100, help="steps from one checkpoint to the next")
    add("--batch-size", type=at_least(1), default=2, help="sequences per step")
    add("--sequence-length", type=at_least(2), default=128, help="tokens per sequence")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> AdapterTraining:
    """Return the training of a model with adapters; say how large its parts are."""
    if options.checkpoint:
        config = checkpoint_config(options.checkpoint, options.num_layers)
    else:
        config = random_config(options.preset, options.num_layers)
    text = load_text(options.data, options.sequence_length, config, options.checkpoint)
    print(f"Text: {text.description}")
    model = published_model(config, options.checkpoint) if options.checkpoint else random_model(config, options.seed)
    if options.experts == "bfloat16":
        dequantize_experts(model)
    size, expanded = expert_bytes(model)
    others = sum(parameter.nbytes for parameter in model.parameters()) - size
    print(
        f"Experts: {size / MB:,.0f} MB, {size / expanded:.3f} of bfloat16; all other weights: {others / MB:,.0f} MB, "
        "frozen as well"
    )
    training = AdapterTraining(options, with_adapters(model, options.seed), text)
    print(f"Adapters: {training.num_trained:,} trained parameters")
    return training


def train(training: AdapterTraining) -> int:
    """Take the remaining steps and save; return the number of the signal that stopped the run, or 0."""
    options = training.options
    tokens_per_step = options.batch_size * options.sequence_length
    progress = tqdm(
        total=training.steps * tokens_per_step,
        initial=training.step * tokens_per_step,
        unit=" tokens",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5,
    )
    stopped_by = 0
    with progress, StopRequest() as stop:
        while training.step < training.steps and not stopped_by:
            loss = training.train_step()
            memory = f"peak memory {status('VmHWM') / GB:.1f} GB"
            progress.set_postfix_str(f"step {training.step}, loss {loss:.3f}, {memory}", refresh=False)
            progress.update(tokens_per_step)
            stopped_by = stop.signal or 0
            if training.step == training.steps or training.step % options.save_every == 0 or stopped_by:
                training.save()
    return stopped_by


def finetune(training: AdapterTraining, words: list[str]) -> int:
    """Train from the start or from the checkpoint, then write the adapters; return the exit status."""
    options = training.options
    checkpoint.prepare(training.checkpoint)
    if options.resume:
        training.resume()
        print(f"Resumed at step {training.step} of {training.steps}")
    elif training.checkpoint.exists():
        print(f"The first save replaces the checkpoint in {options.out}; --resume would continue it")
    begin, first = time.perf_counter(), training.step
    stopped_by = train(training)
    seconds = time.perf_counter() - begin
    if stopped_by:
        again = [*words, *([] if options.resume else ["--resume"])]
        print(f"Stopped and saved at step {training.step}. To continue: {shlex.join(again)}")
        return 128 + stopped_by
    report(training, training.step - first, seconds)
    return 0


def report(training: AdapterTraining, num_steps: int, seconds: float) -> None:
    """Print the result and write the adapters."""
    options, losses = training.options, training.losses
    tenth = max(1, len(losses) // 10)
    before, after = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"Loss: {before:.3f} in the first tenth of the steps, {after:.3f} in the last")
    if num_steps:
        tokens_per_second = num_steps * options.batch_size * options.sequence_length / seconds
        print(f"{60 * num_steps / seconds:.1f} steps per minute, {tokens_per_second:,.1f} tokens per second")
    print(f"Peak of the resident memory: {status('VmHWM') / GB:.2f} GB")
    folder = options.out / "adapters"
    training.model.save_pretrained(folder)
    print("Adapters:", folder)


def run(options: argparse.Namespace, words: list[str]) -> int:
    """Build the model, lock the output folder and train; return the exit status."""
    torch.set_num_threads(options.threads)
    if options.resume:
        checkpoint.find(options.out / "checkpoint")
    prepare_output(options.out)
    with locked(options.out):
        return finetune(build(options), words)


if __name__ == "__main__":
    sys.exit(exit_status("finetune_quantized", lambda: run(parse_options(), command())))
