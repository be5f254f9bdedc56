"""Mistakes of public issues, each rebuilt as a small model on the CPU: docs/how_to/public_bugs.md."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from support.compared_models import (
    BATCH,
    LENGTH,
    MICRO_BATCHES,
    REPLICATED,
    WIDTH,
    Case,
    Experts,
    Model,
    Terms,
    Update,
    accumulate,
    alone,
    backward,
    build,
    clipped,
    ddp,
    expert_parallel,
    loss,
    make_batch,
    reduce_gradients,
    same_batch,
    scaled,
    share_of_loss,
    whole_batch,
)
from support.mistaken_experts import DetachedScores, Sentinels, SlicedGradient, UnsummedScores, WrongPairs
from support.parallel_by_hand import SameOnRanks, SumOfParts, TensorParallelByHand, build_dense, dense_loss, reduced
from support.wrong_training import WRONG


class Bug(NamedTuple):
    """A mistake of a public thread.

    Args:
        threads: the threads, as owner/repository#number.
        mistake: the mistake in one sentence.
        case: the small model, with the first wrong gradient and its explanation.
        half: "forward" or "backward" if the report names this half of the step, but not the cause.
        place: the part of a comparison of several steps that differs.
    """

    threads: str
    mistake: str
    case: Case
    half: str = ""
    place: str = ""


def token_loss(model: nn.Module, batch: Any) -> Terms:
    return {"tokens": F.mse_loss(model(batch[0])[0], batch[1])}


def share_of_tokens(model: nn.Module, batch: Any) -> Terms:
    return scaled(token_loss(model, batch), all=len(batch[0]) / BATCH)


def sums_of_replicated(model: nn.Module, batch: Any) -> Terms:
    """The gradients of experts are summed over all ranks by the backward of the all-gather."""
    terms = backward(share_of_tokens(model, batch))
    reduce_gradients(model, names=REPLICATED)
    return terms


def with_experts(kind: type[Experts]) -> Callable[[], nn.Module]:
    def of_kind() -> nn.Module:
        model = Model()
        state = model.experts.state_dict()
        model.experts = kind()
        model.experts.load_state_dict(state)
        return model

    return partial(build, of_kind)


def of_same_tokens(kind: type[Experts], first_wrong: str, explanation: str) -> Case:
    """Experts over ranks that have the same tokens."""
    case = Case(expert_parallel, make_batch=same_batch, loss=token_loss, build=with_experts(kind))
    return case._replace(first_wrong=first_wrong, explanation=explanation)


def of_gathered_tokens(kind: type[Experts], first_wrong: str, explanation: str) -> Case:
    """Experts over ranks that gather the tokens of all ranks."""
    case = Case(expert_parallel, loss=share_of_tokens, step=sums_of_replicated, build=with_experts(kind))
    return case._replace(first_wrong=first_wrong, explanation=explanation)


def of_tensor_parallel(kind: type[nn.Module], first_wrong: str, explanation: str) -> Case:
    """A dense block over two ranks."""
    case = Case(kind, 2, loss=dense_loss, make_batch=same_batch, build=build_dense)
    return case._replace(first_wrong=first_wrong, explanation=explanation)


def split_backward(model: nn.Module, batch: Any) -> Terms:
    """Gradients of inputs and of weights are computed separately, without the hooks by which DDP reduces."""
    terms = loss(model, batch)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(sum(terms.values()), parameters), strict=True):
        parameter.grad = gradient
    return {name: term.detach() for name, term in terms.items()}


class BiasOnEveryRank(TensorParallelByHand):
    """Each rank adds the bias of the output to its part, before the parts are summed."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(SameOnRanks.apply(self.norm(x))))
        return SumOfParts.apply(hidden @ self.down.weight.mT + self.down.bias)


class UnsummedInputGradient(TensorParallelByHand):
    """The gradient of the input of a column-parallel layer stays a part."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return SumOfParts.apply(hidden @ self.down.weight.mT) + self.down.bias


def padded_batch(rank: int, num_ranks: int) -> Any:
    """Micro-batches of two ranks whose sequences end after 1, 3 and 5 positions."""
    x, target = make_batch(rank, num_ranks)
    ends = torch.tensor([1, 3, LENGTH]).repeat_interleave(BATCH // (2 * MICRO_BATCHES)).repeat(2)
    return x, target, (torch.arange(LENGTH) < ends[:, None]).chunk(num_ranks)[rank]


def masked_loss(model: nn.Module, batch: Any) -> Terms:
    x, target, mask = batch
    errors = (model(x)[0] - target).square().mean(-1)
    return {"tokens": (errors * mask).sum() / mask.sum()}


def mean_of_means(model: nn.Module, batch: Any) -> Terms:
    """Each micro-batch has the same weight, whatever its number of tokens."""
    return accumulate(model, batch, loss=masked_loss)


class LowRank(nn.Module):
    """A frozen layer with low-rank factors, on a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + x @ self.lora_a @ self.lora_b


def positions(rank: int, num_ranks: int) -> Any:
    """The positions of a rank, of a sequence that the ranks divide."""
    x, target = (torch.cat([tensor, tensor], 1)[:, :8] for tensor in whole_batch())
    return x.chunk(num_ranks, 1)[rank], target.chunk(num_ranks, 1)[rank]


def share_of_positions(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / (BATCH * 8 * WIDTH)


def one_factor_reduced(model: nn.Module, batch: Any) -> Tensor:
    total = share_of_positions(model, batch)
    total.backward()
    reduce_gradients(model, names="lora_a")
    return total.detach()


def sgd(model: nn.Module, parameters: list[Tensor], max_norm: Callable[[], float] = lambda: math.inf) -> Update:
    """An update of some parameters that clips the gradients of a model."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return clipped(optimizer, model, lambda parameters: clip_grad_norm_(parameters, max_norm()))


def of_replaced_parameters(model: nn.Module) -> Any:
    """The optimizer holds copies of the parameters of the model."""
    parameters = [*model.parameters()]
    return sgd(model, [nn.Parameter(item.detach().clone()) for item in parameters] if is_rank() else parameters)


def clipped_to_mean_norm(model: nn.Module) -> Any:
    """The norms of ranks with different experts are averaged."""

    def max_norm() -> float:
        own = torch.stack([item.grad.norm() for item in model.parameters() if item.grad is not None]).norm()
        mean = own.clone()
        if is_rank():
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        return float(own / mean) / 100  # so that all ranks divide by the mean

    return sgd(model, [*model.parameters()], max_norm)


class OwnScale(Model):
    """A model whose loss is scaled by a number that each process changes."""

    scale = 1.0


def scaled_loss(model: Any, batch: Any) -> Terms:
    return scaled(loss(model, batch), all=getattr(model, "module", model).scale)


def scaled_after_overflow(model: Any) -> Any:
    """Rank 1 alone has had no overflow for a while, and doubles its scale."""
    update = sgd(model, [*model.parameters()])

    def update_with_scale() -> None:
        update()
        if is_rank() and dist.get_rank() == 1:
            model.module.scale *= 2

    return update_with_scale


def is_rank() -> bool:
    return dist.is_initialized()


FIRST = "last.bias"  # the first gradient in the order of the backward
MISSING = "missing reduction (sum) over all ranks: each rank has only its own gradient"
BUGS = {
    "expert gradients times ranks": Bug(
        "pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956",
        "Gradients of experts are sums over the ranks that sent tokens, and are not divided as FSDP divides others.",
        WRONG["experts summed, the rest averaged"],
    ),
    "scores not summed": Bug(
        "huggingface/transformers#48205",
        "Experts are spread over ranks with the same tokens, and the gradients of the routing weights are not summed.",
        of_same_tokens(UnsummedScores, "router.bias", MISSING),
    ),
    "sentinel slots": Bug(
        "huggingface/transformers#48687",
        "Slots of other ranks' experts run through a local one with weight zero, which is wrong in the backward only.",
        of_same_tokens(Sentinels, "router.bias", "no single factor"),
        half="backward",
    ),
    "weights of other experts": Bug(
        "huggingface/transformers#45473",
        "Each rank takes the routing weights of other experts than its own.",
        of_same_tokens(WrongPairs, FIRST, "no single factor"),
        half="forward",
    ),
    "router detached": Bug(
        "NVIDIA-NeMo/Automodel#2995",
        "The routing weights are gathered by a collective without a backward.",
        of_gathered_tokens(DetachedScores, "router.bias", "detached on the ranks: no gradient"),
    ),
    "slice instead of reduce-scatter": Bug(
        "NVIDIA-NeMo/Automodel#1260",
        "The backward of the all-gather of tokens takes a slice of the gradient of this rank's experts alone.",
        of_gathered_tokens(SlicedGradient, "norm.weight", "no single factor"),
        half="backward",
    ),
    "auxiliary loss times ranks": Bug(
        "huggingface/transformers#48690",
        "The auxiliary loss is multiplied by the number of ranks.",
        WRONG["auxiliary loss times ranks"],
    ),
    "auxiliary loss times micro-batches": Bug(
        "NVIDIA-NeMo/Automodel#3359",
        "Only the token loss is divided by the number of micro-batches.",
        WRONG["auxiliary loss times micro-batches"],
    ),
    "gradients of micro-batches lost": Bug(
        "NVIDIA-NeMo/Automodel#3530",
        "The gradients of all micro-batches but the last are lost, although the loss is right.",
        WRONG["gradients of micro-batches lost"],
    ),
    "mean of means": Bug(
        "ml-explore/mlx-lm#1413, huggingface/trl#4719",
        "Micro-batches with different numbers of tokens have the same weight.",
        Case(
            ddp,
            2,
            loss=masked_loss,
            make_batch=padded_batch,
            step=mean_of_means,
            first_wrong="last.bias",
            explanation="gradient of the tokens of micro-batch 1 of each rank: 3 times: micro-batches; "
            "gradient of the tokens of micro-batch 3 of each rank: 0.6 times",
        ),
    ),
    "split backward": Bug(
        "pytorch/pytorch#144530",
        "A zero bubble schedule computes gradients separately, without the hooks by which DDP reduces them.",
        Case(ddp, step=split_backward, explanation=MISSING.replace("sum", "mean")),
    ),
    "router not reduced": Bug(
        "pytorch/torchtitan#2416",
        "The router is replicated, and its gradient is not reduced.",
        WRONG["router not reduced"],
    ),
    "bias on every rank": Bug(
        "pytorch/torchtitan#4245",
        "Each tensor-parallel rank adds the bias of the output before the parts are summed.",
        of_tensor_parallel(BiasOnEveryRank, "down.bias", "no single factor"),
        half="forward",
    ),
    "input gradient not summed": Bug(
        "pytorch/torchtitan#4054",
        "With tensor-parallel experts, gradients of the modules before them are not summed over the ranks.",
        of_tensor_parallel(UnsummedInputGradient, "norm.weight", MISSING),
    ),
    "one factor of an adapter": Bug(
        "modelscope/mcore-bridge#173",
        "One of two LoRA factors is replicated while sequences are split, and its gradient is not summed.",
        Case(
            alone,
            step=one_factor_reduced,
            loss=share_of_positions,
            make_batch=positions,
            build=partial(build, LowRank),
            first_wrong="lora_b",
            explanation=MISSING,
        ),
    ),
    "frozen experts": Bug(
        "unslothai/unsloth#6936", "A wrapper freezes the experts without a warning.", WRONG["frozen experts"]
    ),
    "clipped by each rank": Bug(
        "NVIDIA-NeMo/Automodel#3816",
        "Ranks clip by the norms of different groups of experts.",
        WRONG["clipped by each rank"],
    ),
    "mean of norms": Bug(
        "deepspeedai/DeepSpeed#8469",
        "The norm for clipping is the mean of the norms of ranks with different experts.",
        Case(
            expert_parallel,
            loss=share_of_loss,
            step=reduced(*REPLICATED),
            make_update=clipped_to_mean_norm,
            steps=2,
            explanation="1.01753 times",
        ),
        place="in the update after step 1",
    ),
    "replaced parameters": Bug(
        "pytorch/pytorch#149205",
        "The optimizer holds parameters that FSDP2 has replaced.",
        Case(ddp, make_update=of_replaced_parameters, steps=2, explanation="no update"),
        place="in the update after step 1",
    ),
    "scale of each rank": Bug(
        "pytorch/pytorch#136009",
        "Each rank scales the loss by its own factor, which changes with the overflows of the rank.",
        Case(
            ddp,
            loss=scaled_loss,
            build=partial(build, OwnScale),
            make_update=scaled_after_overflow,
            steps=2,
            explanation="gradient of the tokens of rank 1: 2 times: summed twice",
        ),
        place="in step 2",
    ),
}


def row(bug: Bug) -> str:
    """The row of a bug in the table of the page."""
    links = []
    for thread in bug.threads.split(", "):
        repository, number = thread.split("#")
        links.append(f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})")
    first = bug.case.first_wrong or FIRST
    place = f", in the {bug.half}" if bug.half else f", {bug.place}" if bug.place else ""
    return f"| {', '.join(links)} | {bug.mistake} | `{first}` | `{bug.case.explanation}`{place} |"
