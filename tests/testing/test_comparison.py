"""`compare_ranks` finds mistakes by name and factor; docs/how_to/public_bugs.md names the threads of many."""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from support.slow_cases import by_default
from testing.compared_models import (
    LENGTH,
    REPLICATED,
    WIDTH,
    Case,
    Model,
    Terms,
    Update,
    accumulate,
    alone,
    backward,
    build,
    build_feed_forward,
    clipped,
    compare,
    ddp,
    expert_and_data_parallel,
    expert_parallel,
    loss,
    other_lengths,
    reduce_gradients,
    reduced,
    scaled,
    share_of_loss,
    whole_batch,
)

PAGE = (Path(__file__).parents[2] / "docs/how_to/public_bugs.md").read_text()
FIRST = "last.bias"  # the first gradient in the order of the backward


class Mistake(NamedTuple):
    """A case with a mistake, and what must be found."""

    case: Case
    explanation: str
    first_wrong: str = FIRST
    place: str = ""  # in several steps, such as "in step 2"


def own_gradient_counted_twice(model: nn.Module, batch: Any) -> Terms:
    """The gradients of a rank are added to the sum over all ranks, which contains them."""
    terms = backward(share_of_loss(model, batch))
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    reduce_gradients(model)
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        assert parameter.grad is not None
        parameter.grad += gradient
    return terms


def replicas_not_reduced(model: nn.Module, batch: Any) -> Terms:
    """Experts are reduced by their group alone, not over its replicas."""
    terms = backward(share_of_loss(model, batch))
    reduce_gradients(model, names=REPLICATED)
    return terms


def times_ranks(model: nn.Module, batch: Any) -> Terms:
    return backward(scaled(loss(model, batch), aux=dist.get_world_size()))


def times_micro_batches(model: nn.Module, batch: Any) -> Terms:
    """Only the token loss is divided by the number of micro-batches."""
    return accumulate(model, batch, aux=1.0)


def gradients_wiped(model: nn.Module, batch: Any) -> Terms:
    """Gradients of earlier micro-batches are lost, the loss is right."""

    def wipe(model: nn.Module, is_last: bool) -> None:
        if is_last:
            model.zero_grad()

    return accumulate(model, batch, wipe)


def backward_twice(model: nn.Module, batch: Any) -> Terms:
    """Two backward passes without `zero_grad` in between."""
    backward(loss(model, batch))
    return backward(loss(model, batch))


def sum_over_positions(model: nn.Module, batch: Any) -> Terms:
    """The loss of a rank is divided by its sequences, not by its tokens."""
    return backward(scaled(loss(model, batch), all=LENGTH))


class DetachedWeights(Model):
    """Routing weights without a gradient: the router learns from the auxiliary loss alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.gelu(self.first(x))
        logits = self.router(x)
        weights = logits.softmax(-1)
        weights = weights.detach() if dist.is_initialized() else weights
        x = x + self.experts(self.norm(x), weights)
        return self.last(x), logits.logsumexp(-1).square().mean()


def frozen_experts(model: nn.Module) -> nn.Module:
    model.experts.requires_grad_(False)
    return ddp(model)


def overflow(model: nn.Module) -> nn.Module:
    model.first.bias.register_hook(lambda gradient: gradient / 0)
    return ddp(model)


def average(model: nn.Module, batch: Any, names: str = "") -> Terms:
    terms = backward(loss(model, batch))
    reduce_gradients(model, names=names, op=dist.ReduceOp.AVG)
    return terms


def clipped_by_each_rank(model: nn.Module, batch: Any) -> Terms:
    terms = average(model, batch)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1 + dist.get_rank()
    return terms


def loss_of_tokens(model: nn.Module, batch: Any) -> Terms:
    return {"loss": F.mse_loss(model(batch[0]), batch[1])}


def forgotten_scale(model: nn.Module, batch: Any) -> Terms:
    """Micro-batches without `set_aux_loss_scale`."""
    return accumulate(model, batch, loss=loss_of_tokens)


def sgd(model: nn.Module) -> Update:
    """Each rank clips by the norm of its own parameters: right for replicas, wrong for experts."""
    return clipped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)


def of_names(model: nn.Module) -> Update:
    """Weight decay of some parameters by names, to which DDP adds a prefix."""
    decayed = [parameter for name, parameter in model.named_parameters() if name.startswith("experts")]
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("experts")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return clipped(torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2), model)


def own_part(model: nn.Module) -> Update:
    """Each rank updates some of the parameters, without sending them to the others."""
    if not dist.is_initialized():
        return sgd(model)
    return clipped(torch.optim.SGD([*model.parameters()][dist.get_rank() :: dist.get_world_size()], lr=0.1), model)


def never_cleared(model: nn.Module) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        optimizer.step()
        if not dist.is_initialized():
            optimizer.zero_grad()

    return update


def of_replaced_parameters(model: nn.Module) -> Update:
    """The optimizer holds copies of the parameters of the model."""
    parameters = [*model.parameters()]
    if dist.is_initialized():
        parameters = [nn.Parameter(item.detach().clone()) for item in parameters]
    return clipped(torch.optim.SGD(parameters, lr=0.1), model)


def build_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))


def stages_with_ddp(model: Any) -> nn.Module:
    """Two of four stages, under the names of the blocks, and a zero bubble schedule that trains them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    rank, stages = mesh.get_local_rank("pipeline"), []
    blocks: Any = nn.Module()
    for number in (rank, rank + 2):
        blocks.add_module(str(number), model[number])
        stage = nn.parallel.DistributedDataParallel(model[number], process_group=mesh.get_group("data"))
        stages.append(PipelineStage(stage, number, 4, torch.device("cpu"), group=mesh.get_group("pipeline")))
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=F.mse_loss)
    object.__setattr__(blocks, "schedule", schedule)
    return blocks


def step_of_stages(blocks: Any, batch: tuple[Tensor, Tensor]) -> Tensor | None:
    losses: list[Tensor] = []
    is_last = hasattr(blocks, "3")
    blocks.schedule.step(*() if is_last else batch[:1], **{"target": batch[1], "losses": losses} if is_last else {})
    return torch.stack(losses).mean() if is_last else None


def batch_of_pipeline(rank: int, num_ranks: int) -> tuple[Tensor, ...]:
    """The ranks of a pipeline have the same sequences."""
    num_pipelines = max(num_ranks // 2, 1)
    return tuple(whole.chunk(num_pipelines)[rank // 2] for whole in whole_batch())


def loss_of_blocks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


STAGES = Case(stages_with_ddp, 4, step_of_stages, loss_of_blocks, batch_of_pipeline, build_blocks)
RANKS = "number of ranks"
ALONE = "missing reduction ({}) over {}: each rank has only its own {}"
WRONG = {
    "own gradient counted twice": Mistake(
        Case(alone, step=own_gradient_counted_twice),
        "gradient of the tokens of rank 0, 1, 2, 3: 2, 1, 1, 1 times on rank 0; "
        "1, 2, 1, 1 times on rank 1; 1, 1, 2, 1 times on rank 2; 1, 1, 1, 2 times on rank 3",
    ),
    "experts not reduced over replicas": Mistake(
        Case(expert_and_data_parallel, loss=share_of_loss, step=replicas_not_reduced),
        ALONE.format("sum", "mesh axis 'replicate'", "gradient"),
        "experts.down",
    ),
    "a zero bubble schedule of torch with DDP": Mistake(
        STAGES, ALONE.format("mean", "mesh axis 'data'", "gradient"), "3.0.bias"
    ),
    "experts summed, the rest averaged": Mistake(
        Case(expert_parallel, step=partial(average, names=REPLICATED)), f"4 times: {RANKS}", "experts.down"
    ),
    "loss not divided by positions": Mistake(Case(ddp, 2, step=sum_over_positions), "5 times: sequence length"),
    "backward twice": Mistake(Case(ddp, step=backward_twice), "2 times: micro-batches or summed twice"),
    "clipped by each rank": Mistake(
        Case(alone, step=clipped_by_each_rank),
        f"right on rank 0, 0.5 times on rank 1, 0.333333 times on rank 2, 0.25 times: 1 / {RANKS} on rank 3",
    ),
    "not finite": Mistake(Case(overflow, 2), "not finite", "first.bias"),
    # Terms of the loss
    "auxiliary loss times micro-batches": Mistake(
        Case(ddp, 2, step=times_micro_batches), "the term 'aux' is 3 times: micro-batches", "router.bias"
    ),
    "routing weights detached": Mistake(
        Case(ddp, 2, build=partial(build, DetachedWeights)), "the term 'tokens' is missing", "router.bias"
    ),
    "scale of an auxiliary loss over the batch forgotten": Mistake(
        Case(ddp, 2, loss=loss_of_tokens, build=build_feed_forward, step=forgotten_scale),
        "mean of the gradients of each rank's batch alone, not the gradient of the whole batch; "
        "the auxiliary gradient added in the backward is 3 times: micro-batches, see set_aux_loss_scale",
        "1.router.weight",
    ),
    # Tokens
    "gradients of micro-batches lost": Mistake(
        Case(ddp, 2, step=gradients_wiped), "gradient of the tokens of micro-batch 1, 2 of each rank: missing"
    ),
    "ranks with different numbers of tokens": Mistake(
        Case(ddp, make_batch=other_lengths),
        "gradient of the tokens of rank 0: 2 times: summed twice; "
        "gradient of the tokens of rank 1, 2, 3: 0.857143 times",
    ),
    # Several steps
    "norms of each rank's experts": Mistake(
        Case(expert_parallel, 2, reduced(*REPLICATED), share_of_loss, make_update=sgd, steps=2),
        "1.0084 times on rank 0, 1.0148 times on rank 1",
        place="in the update after step 1",
    ),
    "decay by names": Mistake(
        Case(ddp, 2, make_update=of_names, steps=2), "no single factor", "experts.down", "in the update after step 1"
    ),
    "parts that are not sent": Mistake(
        Case(ddp, 2, make_update=own_part, steps=2),
        ALONE.format("sum", "all ranks", "update"),
        place="in the update after step 1",
    ),
    "replaced parameters": Mistake(
        Case(ddp, 2, make_update=of_replaced_parameters, steps=2), "no update", place="in the update after step 1"
    ),
    "gradients of the step before": Mistake(
        Case(ddp, 2, make_update=never_cleared, steps=2),
        "right, and the gradient of the step before",
        place="in step 2",
    ),
}
# Other rows or tests have these explanations.
WRONG_BUT_SLOW = {
    "router not reduced": Mistake(
        Case(alone, step=reduced("first", "last", "norm", "experts")),
        ALONE.format("sum", "all ranks", "gradient"),
        "router.bias",
    ),
    "auxiliary loss times ranks": Mistake(
        Case(ddp, step=times_ranks), f"the term 'aux' is 4 times: {RANKS}", "router.bias"
    ),
    "frozen experts": Mistake(Case(frozen_experts), "frozen on the ranks: requires_grad is False", "experts.down"),
}


@pytest.mark.parametrize("name", by_default(WRONG | WRONG_BUT_SLOW, WRONG))
def test_mistakes_are_found_by_name_and_factor(name: str) -> None:
    mistake: Mistake = (WRONG | WRONG_BUT_SLOW)[name]
    comparison = compare(mistake.case, dtype=torch.float64)
    first = comparison.first_wrong
    assert comparison.verdict == "different" and first is not None, comparison
    assert re.sub(r" \(cosine .*\)", "", first.explanation) == mistake.explanation, comparison
    assert first.name == mistake.first_wrong, comparison
    assert all(output.equal for output in comparison.outputs), comparison
    assert str(comparison).startswith(" ".join(filter(None, ["compare_ranks: different", mistake.place])) + ". ")


def test_the_page_of_public_bugs_shows_these_explanations() -> None:
    shown = {re.split("`", line)[-2] for line in PAGE.splitlines() if line.startswith("| [")}
    found = {mistake.explanation for mistake in (WRONG | WRONG_BUT_SLOW).values()}
    elsewhere = {"gradient of the tokens of rank 1: 2 times: summed twice"}  # in test_training_runs.py
    assert len(shown) > 5 and shown <= found | elsewhere, shown - found
