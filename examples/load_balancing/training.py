"""Trainings with different ways to balance the load, and their measurements."""

from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from maxmoe import record_routing
from pretraining.corpus import Corpus
from pretraining.trainer import Trainer

# Ways to balance the load, by the fields of `MoEConfig`.
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "loss per sequence": {"load_balance_loss_weight": 1e-2, "load_balance_scope": "sequence"},
    "loss over the step": {"load_balance_loss_weight": 1e-2, "load_balance_scope": "step"},
    "sign": {"score_correction_bias": True, "correction_bias_update_rate": 1e-3},
    "quantile": {
        "score_correction_bias": True,
        "correction_bias_rule": "quantile",
        "correction_bias_update_rate": 1.0,
    },
}


@dataclass(frozen=True)
class Run:
    """Results of a training.

    Args:
        way: key in WAYS.
        seed: seed of parameters and data order.
        load: largest load of an expert over the mean load, mean over the layers, of each step.
        dead: number of experts without a token in the last step, in all layers.
        held_out: pairs of step and bits per byte on the held-out text.
        specialisation: mutual information of byte and expert, mean over the layers; see `mutual_information`.
    """

    way: str
    seed: int
    load: list[float]
    dead: int
    held_out: list[tuple[int, float]]
    specialisation: float

    @property
    def last_load(self) -> float:
        """Mean load over the last tenth of the steps."""
        last = self.load[-max(len(self.load) // 10, 1) :]
        return sum(last) / len(last)


def train(options: Namespace, corpus: Corpus, way: str) -> Run:
    """Train a model from the start."""
    trainer = Trainer(options, corpus, WAYS[way])
    for step in tqdm(range(1, trainer.steps + 1), desc=f"{way}, seed {options.seed}", dynamic_ncols=True):
        trainer.train_step()
        if step == trainer.steps or step % options.eval_every == 0:
            trainer.evaluate()
    rows = trainer.history.load.rows()
    load: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        load[row.step].append(row.load_max_over_mean)
    return Run(
        way=way,
        seed=options.seed,
        load=[sum(layers) / len(layers) for layers in load.values()],
        dead=sum(row.dead_experts for row in rows if row.step == trainer.steps),
        held_out=trainer.history.held_out,
        specialisation=specialisation(trainer),
    )


@torch.no_grad()
def specialisation(trainer: Trainer) -> float:
    """Return the mutual information of a held-out byte and the experts that it is routed to, mean over the layers."""
    options = trainer.options
    tokens = trainer.corpus.held_out[:, :-1].long().reshape(-1, options.sequence_length)
    with record_routing(trainer.model) as record:
        for batch in tokens.split(options.batch_size):
            trainer.model(batch)
    information = []
    for calls in record.calls.values():
        experts = torch.cat([call.flatten(0, -2) for call in calls]).long()
        slots = tokens.reshape(-1, 1).expand_as(experts)
        joint = torch.zeros(256, options.num_experts).index_put(
            (slots.flatten(), experts.flatten()), torch.ones(experts.numel()), accumulate=True
        )
        information.append(mutual_information(joint))
    return sum(information) / len(information)


def mutual_information(counts: Tensor) -> float:
    """Return the mutual information, in bits, of rows and columns, from the counts of their pairs ``(M, N)``.

    0 if the experts are chosen without regard to the byte, at most log2(E).
    """
    joint = counts.double() / counts.sum()
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    present = joint > 0
    return float((joint[present] * (joint[present] / independent[present]).log2()).sum())
