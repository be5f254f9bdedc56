"""Training on several ranks with layers, meshes and pipelines of maxmoe: right, and with mistakes."""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maxmoe
from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.pipelining import Pipeline
from maxmoe.sharding import LogicalRules, Mesh
from support import parallel_decoder
from support.compared_models import (
    BATCH,
    WIDTH,
    Case,
    Terms,
    accumulate,
    alone,
    backward,
    ddp,
    reduce_gradients,
    scaled,
)
from support.parts import part_by_definition


def decoder_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Terms:
    """The share of these tokens in the mean over all tokens, and the auxiliary loss of the whole batch."""
    output = model(batch[0])
    token_losses = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return {"tokens": token_losses / (parallel_decoder.BATCH * parallel_decoder.LENGTH), "aux": output.aux_loss}


def decoder_batch(sizes: dict[str, int], rules: str, rank: int, num_ranks: int) -> tuple[Tensor, ...]:
    """The tokens of a rank by the rules."""
    if num_ranks == 1:
        return parallel_decoder.batch()
    mesh = Mesh.planned(sizes)
    spec = parallel_decoder.token_spec(mesh, LogicalRules.load(rules))
    return tuple(part_by_definition(tokens, spec, mesh, rank) for tokens in parallel_decoder.batch())


def by_maxmoe(sizes: dict[str, int], rules: str, dispatch: str, model: nn.Module) -> nn.Module:
    return maxmoe.parallelize(model, Mesh(sizes), rules, dispatch=dispatch)  # type: ignore[arg-type]


def decoder_case(rules: str, dispatch: str = "auto", **sizes: int) -> Case:
    return Case(
        partial(by_maxmoe, sizes, rules, dispatch),
        Mesh.planned(sizes).num_ranks,
        loss=decoder_loss,
        make_batch=partial(decoder_batch, sizes, rules),
        build=parallel_decoder.decoder,
    )


def stages_of_maxmoe(model: nn.Module) -> Pipeline:
    def token_losses(output: Any, targets: Tensor) -> Tensor:
        return decoder_loss(lambda _: output, (targets, targets))["tokens"]  # type: ignore[arg-type]

    return maxmoe.pipeline(model, Mesh({"stage": 2}), loss=token_losses, num_micro_batches=4, aux_loss_scale=0.25)


def step_of_pipeline(pipeline: Pipeline, batch: tuple[Tensor, Tensor]) -> Terms:
    output = pipeline.step(*batch)
    return {"tokens": output.loss, "aux": output.aux_loss}


def build_feed_forward(scope: Literal["sequence", "batch"]) -> nn.Module:
    """A layer whose backward adds the gradient of its auxiliary loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
    config = MoEConfig(**sizes, load_balance_loss_weight=0.1, load_balance_scope=scope)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MoEFeedForward(config))


def loss_of_tokens(model: nn.Module, batch: Any) -> Terms:
    return {"loss": F.mse_loss(model(batch[0]), batch[1])}


def share_of_tokens(model: nn.Module, batch: Any) -> Terms:
    return scaled(loss_of_tokens(model, batch), all=len(batch[0]) / BATCH)


def forgotten_scale(model: nn.Module, batch: Any) -> Terms:
    """Micro-batches without `set_aux_loss_scale`."""
    return accumulate(model, batch, loss=loss_of_tokens)


def summed_shares(model: nn.Module, batch: Any) -> Terms:
    terms = backward(share_of_tokens(model, batch))
    reduce_gradients(model)
    return terms


RIGHT = {
    "ring of experts": decoder_case("ep-as-dp", "ring_of_experts", expert=2),
    "ragged all-to-all": decoder_case("ep-as-dp", "ragged_all_to_all", expert=2),
    "gathered weights": decoder_case("ep-as-dp", "gather_weights", expert=2),
    "experts and FSDP2": decoder_case("ep-as-dp", fsdp=2, expert=2),
    "expert and tensor parallel": decoder_case("ep-tp", data=2, expert=2),
    "context parallel": decoder_case("cp-as-ep", context=2),
    "tensor parallel by rules": decoder_case("default", tensor=2),
    "stages of maxmoe": Case(
        stages_of_maxmoe,
        2,
        step=step_of_pipeline,
        loss=decoder_loss,
        make_batch=partial(decoder_batch, {"stage": 2}, "default"),
        build=parallel_decoder.decoder,
    ),
}
ADDED = "the auxiliary gradient added in the backward is {}, see set_aux_loss_scale"
OF_EACH_BATCH = "mean of the gradients of each rank's batch alone, not the gradient of the whole batch"


def of_feed_forward(scope: Literal["sequence", "batch"], explanation: str, **changes: Any) -> Case:
    """A mistake in the gradient of the auxiliary loss."""
    case = Case(ddp, loss=loss_of_tokens, build=partial(build_feed_forward, scope), first_wrong="1.router.weight")
    return case._replace(explanation=explanation, **changes)


WRONG = {
    "scale of the auxiliary loss forgotten": of_feed_forward(
        "sequence", ADDED.format("3 times: micro-batches"), step=forgotten_scale
    ),
    "scale of an auxiliary loss over the batch forgotten": of_feed_forward(
        "batch", f"{OF_EACH_BATCH}; {ADDED.format('3 times: micro-batches')}", step=forgotten_scale
    ),
    "auxiliary gradient of each rank summed": of_feed_forward(
        "sequence",
        ADDED.format("4 times: number of ranks"),
        parallelize=alone,
        loss=share_of_tokens,
        step=summed_shares,
    ),
    "auxiliary loss of each rank's tokens": of_feed_forward("batch", OF_EACH_BATCH),
}
