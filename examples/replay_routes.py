"""Train a small language model by GRPO, with and without the routes of the sampler, and compare log-probabilities.

    python examples/replay_routes.py                                         both ways, some minutes
    python examples/replay_routes.py --steps 300 --num-experts 64 --top-k 4  more experts to confuse

A copy of the model in bfloat16 samples, as an inference server does, and the model trains in float32. Rounding changes
which experts a router selects, so that the trained model computes other log-probabilities for the sampled tokens than
the sampler did. One model trains with the routes of the sampler, which come in an array as vLLM and SGLang return it,
the other one routes anew. The reward of a sequence is the fraction of its tokens that are odd after an even token, or
even after an odd one. The picture replay_routes.png in the folder --out has the difference of the log-probabilities and
the reward in each step. Ctrl-C finishes the step and draws it.
"""

import argparse
import copy
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import maxmoe
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn import RoutingRecord
from pretraining import InputError
from pretraining.command import LARGEST_SEED, HelpFormatter, StopRequest, at_least, exit_status, prepare_output
from pretraining.figures import save

PICTURE, VOCABULARY, PROMPT = "replay_routes.png", 64, 4
WAYS = {"replayed": "#1b6ca8", "routed anew": "#b5541c"}


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/replay_routes"), help="folder of the picture")
    add("--steps", type=at_least(1), default=120, help="steps of each model")
    add("--prompts", type=at_least(1), default=8, help="prompts per step")
    add("--group-size", type=at_least(2), default=8, help="sequences of each prompt, among which rewards are compared")
    add("--length", type=at_least(1), default=24, help="generated tokens of a sequence")
    add("--learning-rate", type=at_least(0, float, at_most=0.1), default=5e-4, help="of AdamW")
    add("--num-experts", type=at_least(1), default=32, help="experts of a block")
    add("--top-k", type=at_least(1), default=2, help="experts of a token")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters, prompts and samples")
    add("--threads", type=at_least(1, at_most=1024), default=os.cpu_count(), help="to compute with")
    return parser.parse_args(arguments)


@dataclass
class Run:
    """A model in training, and the measurements of each step.

    Args:
        way: key of `WAYS`.
        model: model in float32.
        learning_rate: learning rate of AdamW.
        differences: mean of |trained - sampled log-probability| over the generated tokens of a step.
        rewards: mean reward of a step.
    """

    way: str
    model: Decoder
    learning_rate: float
    differences: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, weight_decay=0.0)

    def step(self, prompts: Tensor, options: argparse.Namespace) -> None:
        """Sample, compute rewards and take a step of GRPO."""
        tokens, sampled, routes = sample(self.model, prompts, options.length)
        reward = ((tokens[:, PROMPT:] + tokens[:, PROMPT - 1 : -1]) % 2).float().mean(1)
        groups = reward.view(-1, options.group_size)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        paths = [name for name, module in self.model.named_modules() if isinstance(module, maxmoe.MoE)]
        ends = torch.arange(len(tokens) + 1) * (tokens.shape[1] - 1)
        record = RoutingRecord.from_array(routes, paths, cu_seqlens=ends)
        with maxmoe.replay_routing(self.model, record) if self.way == "replayed" else nullcontext():
            output = self.model(tokens[:, :-1])
            trained = log_probabilities(output.logits, tokens[:, 1:])[:, PROMPT - 1 :]
            ratio = (trained - sampled).exp()
            clipped = ratio.clamp(0.8, 1.2)
            (output.aux_loss - torch.minimum(ratio * advantage, clipped * advantage).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.differences.append((trained - sampled).abs().mean().item())
        self.rewards.append(reward.mean().item())


def sample(model: Decoder, prompts: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Generate with a copy in bfloat16, as an inference server does.

    Returns:
        Sequences ``(B, S)``, log-probabilities ``(B, length)`` with which the generated tokens were drawn, and routes
        ``(B * (S - 1), layers, K)`` of all tokens except the last one of each sequence, whose routes are not computed.
    """
    sampler, logits = copy.deepcopy(model).bfloat16().eval(), []
    sampler.register_forward_hook(lambda _model, _arguments, output: logits.append(output.logits[:, -1:]))
    with maxmoe.record_routing(sampler) as record:
        tokens = sampler.generate(prompts, length)
    ends = torch.arange(len(tokens) + 1) * (tokens.shape[1] - 1)
    drawn = log_probabilities(torch.cat(logits, 1), tokens[:, PROMPT:])
    return tokens, drawn, record.joined().to_array(cu_seqlens=ends)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability ``(B, S)`` of each token."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def train(runs: list[Run], options: argparse.Namespace) -> int:
    """Take steps with all models in turn, with the same prompts; return the signal that stopped it, or 0."""
    progress = tqdm(total=options.steps, unit=" steps", dynamic_ncols=True, mininterval=0.5)
    with progress, StopRequest() as stop:
        for step in range(options.steps):
            for run in runs:
                torch.manual_seed(options.seed + step + 1)
                prompts = torch.randint(VOCABULARY, (options.prompts, PROMPT)).repeat_interleave(options.group_size, 0)
                run.step(prompts, options)
            progress.set_postfix_str(", ".join(f"{run.way} {run.differences[-1]:.1e}" for run in runs), refresh=False)
            progress.update()
            if stop.signal:
                return stop.signal
    return 0


def draw(path: Path, runs: list[Run]) -> None:
    """Draw difference and reward over the steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    difference, reward = figure.subplots(1, 2)
    for run in runs:
        steps = range(1, len(run.rewards) + 1)
        label = f"{run.way}, {mean(run.differences):.1e} in the mean"
        difference.plot(steps, run.differences, color=WAYS[run.way], linewidth=1.2, label=label)
        reward.plot(steps, run.rewards, color=WAYS[run.way], linewidth=1.2, label=run.way)
    difference.set(title="|trained - sampled log-probability|", xlabel="step", ylim=(0, None))
    reward.set(title="reward", xlabel="step", ylim=(0, 1))
    for axes in (difference, reward):
        axes.legend(frameon=False, loc="lower left")
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def run(options: argparse.Namespace) -> int:
    """Train both models and draw the picture; return the exit status."""
    torch.set_num_threads(options.threads)
    prepare_output(options.out, PICTURE)
    torch.manual_seed(options.seed)
    try:
        moe = maxmoe.MoEConfig(
            hidden_size=64,
            intermediate_size=64,
            num_experts=options.num_experts,
            top_k=options.top_k,
            load_balance_loss_weight=0.01,
        )
    except ValueError as error:
        raise InputError(f"cannot make the model: {error}") from error
    model = Decoder(DecoderConfig(vocab_size=VOCABULARY, hidden_size=64, num_layers=4, num_heads=4, moe=moe))
    runs = [Run(way, copy.deepcopy(model), options.learning_rate) for way in WAYS]
    stopped_by = train(runs, options)
    draw(options.out / PICTURE, runs)
    print("Picture:", options.out / PICTURE)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(exit_status("replay_routes", lambda: run(parse_options())))
