"""`pipeline`: run a model in stages, each on a part of the mesh."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.adapters import stacked_factors
from maxmoe.expert_load.metrics_accumulator import unpacked
from maxmoe.expert_load.stats import BoundedMoEStats
from maxmoe.nn import MoELayer, check_recompute, recompute_of, set_recompute
from maxmoe.parallel.apply.apply import apply_plan
from maxmoe.parallel.apply.fsdp import fully_shard_stage
from maxmoe.parallel.apply.one_thread import ONE_THREAD
from maxmoe.parallel.clip_grad_norm import clip, squared_norm
from maxmoe.parallel.parallelize import check_settings, plan_warnings
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.boundary import Boundary
from maxmoe.pipelining.layer_losses import LayersOfStages, RecordedLosses, add_aux_losses
from maxmoe.pipelining.micro_batches import facts_of, split
from maxmoe.pipelining.scheduled_run import ScheduledRun
from maxmoe.pipelining.schedules import check_schedule, schedule_kind
from maxmoe.pipelining.stage import Loss, Stage
from maxmoe.pipelining.stage_modules import copied_modules, keep_stages, stage_module, stage_parts
from maxmoe.ranks.agreement import check_ranks_agree
from maxmoe.ranks.named_collectives import all_reduce
from maxmoe.ranks.token_group import FlattenedBatch, TokenGroup
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules


class PipelineOutput(NamedTuple):
    """Results of a step over all micro-batches, stages and ranks; equal on all ranks.

    Attributes:
        loss: ``()``, float64, sum of the losses of all micro-batches, over all ranks with different tokens.
        aux_loss: ``()``, float64, sum of the auxiliary losses of all layers and micro-batches, times `aux_loss_scale`.
        stats: routing statistics of each Mixture-of-Experts layer, by its path in the model. Counts are summed over the
            micro-batches, the entropy is the mean.
    """

    loss: Tensor
    aux_loss: Tensor
    stats: dict[str, BoundedMoEStats]


def pipeline(
    model: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    loss: Loss,
    schedule: str = "1f1b",
    num_micro_batches: int,
    blocks_per_stage: Sequence[int] | None = None,
    stages_per_rank: int | None = None,
    aux_loss_scale: float = 1.0,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    recompute: Collection[str] | None = None,
    strict: bool = False,
    allow_unused: bool = False,
) -> "Pipeline":
    """Cut the blocks of a model over the mesh axis `stage` and parallelize each stage over the other axes.

    A step computes the gradients of

        sum over the micro-batches of (loss + aux_loss_scale * auxiliary losses),

    as in one process that accumulates them over the same micro-batches. Nothing is divided by their number. For the
    mean over the tokens of a step, divide by their number in `loss`, and set ``aux_loss_scale=1 / num_micro_batches``.
    The auxiliary losses are added to the gradients, so `loss` must not add them. The balance loss of the scope "batch"
    is computed per micro-batch; with the scope "sequence", it does not depend on the micro-batches::

        mesh = Mesh({"stage": 2, "expert": 2})
        pipeline = maxmoe.pipeline(model, mesh, loss=loss, schedule="1f1b", num_micro_batches=8)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        output = pipeline.step(tokens, targets)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()

    Args:
        model: model that declares its `pipeline_parts`, see `Declaration`. Afterwards, it has the
            blocks of this rank only, with their names. It is not called itself.
        mesh: mesh with an axis `stage`. All other axes are used within a stage as by `maxmoe.parallelize`.
        rules: rules that map logical names to mesh axes, or the name of a preset.
        loss: function of the output of the model and the targets of a micro-batch, which returns the sum of the losses
            of its tokens, ``()``. Called in the last stage, and on every rank with tensors without values when inputs
            have another shape than before, to check what it returns.
        schedule: "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", or, with a split backward,
            "interleaved_zero_bubble", "zbv" or "dual_pipe_v"; see `torch.distributed.pipelining`. In a stage with a
            `maxmoe.nn.Checkpointed` module that is recomputed, the backward is not split.
        num_micro_batches: number of micro-batches of a step.
        blocks_per_stage: number of blocks of each stage; None to balance parameters and work.
        stages_per_rank: number of stages of each rank; None for 1 with "gpipe" and "1f1b", and 2 with all others.
        aux_loss_scale: factor of the auxiliary losses.
        dispatch: strategy for experts on other ranks, as in `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a layer, as in `maxmoe.parallelize`.
        recompute: names of the parts that are recomputed in the backward, as in `maxmoe.parallelize`.
        strict: as in `maxmoe.parallelize`.
        allow_unused: as in `maxmoe.parallelize`.

    Returns:
        Pipeline with the stages of this rank.

    Raises:
        TypeError: if `mesh` is not a `maxmoe.sharding.Mesh`.
        ValueError: as `maxmoe.parallelize`; for an unknown schedule, or numbers that it cannot run; for a model that
            does not declare its parts, has fewer blocks than stages, shares parameters between stages, or has a
            `StatsAccumulator` already; on every rank, if any of these arguments differs between ranks.

    Source: GPipe (arXiv:1811.06965), 1F1B (arXiv:1806.03377), interleaved 1F1B (arXiv:2104.04473), zero bubble
    (arXiv:2401.10241), DualPipeV (DeepSeek-V3, arXiv:2412.19437).
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a maxmoe.sharding.Mesh, got {type(mesh).__name__}")
    if not callable(loss):
        raise TypeError(f"loss must be a function of output and targets, got {type(loss).__name__}")
    rules = LogicalRules.load(rules)
    recompute = recompute_of(model) if recompute is None else recompute
    settings = {
        "schedule": schedule,
        "num_micro_batches": num_micro_batches,
        "blocks_per_stage and stages_per_rank": (blocks_per_stage, stages_per_rank),
        "aux_loss_scale": aux_loss_scale,
        "dispatch": dispatch,
        "num_chunks": num_chunks,
        "recompute": sorted(map(str, recompute)),
        "strict": strict,
        "allow_unused": allow_unused,
    }
    check_settings(model, mesh, rules, settings)
    kind = schedule_kind(schedule)
    count = check_schedule(schedule, mesh.size(STAGE_AXIS), stages_per_rank, num_micro_batches)
    parts = stage_parts(model, mesh.size(STAGE_AXIS) * count, blocks_per_stage)
    if any(layer.metrics_accumulator is not None for layer in _layers(model).values()):
        raise ValueError("model must have no StatsAccumulator yet: make it of pipeline.model, after maxmoe.pipeline")
    check_recompute(model, recompute)
    within = mesh.within_stage()
    with stacked_factors(model):
        # The plan of the whole model, so that an error in any stage is raised on every rank.
        plan_of = partial(make_plan, mesh=within, rules=rules, dispatch=dispatch, num_chunks=num_chunks)
        plan = plan_of(model, strict=strict, allow_unused=allow_unused)
        for warning in plan_warnings(plan, rules) if mesh.rank == 0 else ():  # the plan is equal on all ranks
            warnings.warn(warning, stacklevel=2)
        set_recompute(model, recompute)
        # A single stage has no neighbor.
        boundary = Boundary(model, plan) if len(parts) > 1 else None
        layers = {path: layer.config.num_selectable_experts for path, layer in _layers(model).items()}
        add_aux_losses(model, aux_loss_scale)
        mine = kind.stages_of(mesh.stage, mesh.size(STAGE_AXIS), count)
        modules = {index: stage_module(model, parts[index]) for index in mine}
        keep_stages(model, [parts[index] for index in mine])
        stages = []
        for index, module in modules.items():
            stage = Stage(index, parts[index], module, copied_modules(model, module), loss)
            stage_plan = plan_of(module, allow_unused=True, splits_backward=kind.splits_backward)
            apply_plan(module, stage_plan, num_chunks, input_check=None)
            fully_shard_stage(stage, module, stage_plan, reshards=not kind.splits_backward)
            stages.append(stage)
        group = mesh.process_group(STAGE_AXIS) if mesh.size(STAGE_AXIS) > 1 else None
        model.layers_of_stages = LayersOfStages(layers, group, within.device_type)  # type: ignore[assignment]
        run = ScheduledRun(kind, stages, len(parts), num_micro_batches, group, within)
        return Pipeline(model, run, boundary, loss, plan.tokens, aux_loss_scale)


def _layers(model: nn.Module) -> dict[str, MoELayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MoELayer)}


class Pipeline:
    """A model in pipeline stages, made by `maxmoe.pipeline`.

    Attributes:
        model: the part of the model that this rank has, for parameters, optimizers, checkpoints, `StatsAccumulator`,
            and to set training or evaluation mode. Its parameters have the names of the whole model. It is not called
            itself. The module and those around its list of blocks are copied for each stage: set their attributes
            before.
    """

    def __init__(
        self,
        model: nn.Module,
        run: ScheduledRun,
        boundary: Boundary | None,
        loss: Loss,
        tokens: TokenGroup,
        aux_loss_scale: float,
    ) -> None:
        self.model = model
        self._run, self._boundary, self._loss, self._tokens = run, boundary, loss, tokens
        self._aux_loss_scale = aux_loss_scale
        self._checked: object = None
        self._recorded: dict[str, RecordedLosses] = {}
        for path, layer in _layers(model).items():
            layer.losses = self._recorded[path] = RecordedLosses(layer.config, layer.losses.balance_loss)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages with their names in the whole model."""
        return self.model.named_parameters()

    def step(self, inputs: Tensor, targets: Any, **options: Any) -> PipelineOutput:
        """Run forward and backward of all micro-batches, and accumulate the gradients of the parameters.

        Args:
            inputs: first argument of the model: this rank's part of the batch, see `maxmoe.parallel.token_sharding`.
                All stages get the same. It is cut along the first dim as by `torch.tensor_split`: the last
                micro-batches may be smaller, or empty.
            targets: tensor, or tensors in a dict or list, cut likewise; the second argument of the loss.
            **options: other arguments of the model. Tensors with the first dim of the inputs are cut likewise, all
                other values are passed to every stage.

        Returns:
            Loss, auxiliary loss and statistics of the whole batch, the same on every rank.

        Raises:
            ValueError: on every rank of the stages, if the inputs differ between stages, the sizes of inputs and
                targets differ, an input requires a gradient, or the loss is not a scalar.
            RuntimeError: if gradients are disabled.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step computes gradients, which torch.no_grad disables: use evaluate")
        return self._execute(inputs, targets, options, with_backward=True)

    def evaluate(self, inputs: Tensor, targets: Any, **options: Any) -> PipelineOutput:
        """Run the forward of all micro-batches; arguments, results and errors are as in `step`."""
        return self._execute(inputs, targets, options, with_backward=False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the total norm of the gradients of all stages, as `maxmoe.parallel.clip_grad_norm_`.

        All ranks must call it, also those whose stages have no trained parameters.

        Returns:
            ``()``, float64, norm before clipping, equal on all ranks.

        Raises:
            ValueError: on every rank, if the ranks of a stage have gradients of different parameters.
        """
        parameters = list(self.parameters())
        squares = squared_norm(parameters).to(self._run.device)
        if self._run.group is not None:
            all_reduce(squares, "squares of gradients over stages", group=self._run.group)
        return clip(parameters, max_norm, squares)

    def update_correction_bias(self, stats: Mapping[str, BoundedMoEStats]) -> None:
        """Take one step of loss-free balancing in the layers of this rank, given `PipelineOutput.stats`."""
        for path, layer in _layers(self.model).items():
            layer.update_correction_bias(stats[path].tokens_per_expert)

    @ONE_THREAD.running()
    def _execute(self, inputs: Tensor, targets: Any, options: dict[str, Any], *, with_backward: bool) -> PipelineOutput:
        for recorded in self._recorded.values():
            recorded.take()  # of a step that has raised an error
        facts = facts_of(inputs, targets, options, self._run.device)
        check_ranks_agree(facts, self._run.device, self._run.group)
        micro_batches = split(inputs, targets, options, self._run.num_micro_batches)
        if self._boundary is not None and facts != self._checked:
            hidden_states = self._boundary.hidden_states(micro_batches[0])
            self._boundary.check_loss(self._loss, hidden_states, micro_batches[0])
            self._run.set_boundary(self._boundary.local_part(hidden_states))
            self._checked = facts
        losses = self._run.run(micro_batches, with_backward=with_backward)
        loss = torch.stack([torch.zeros((), dtype=torch.float64, device=self._run.device), *losses]).sum()
        if self._run.has_last_stage:
            (loss,) = FlattenedBatch(self._tokens).all_reduce_sequence(loss)
        return self._output(loss)

    def _output(self, loss: Tensor) -> PipelineOutput:
        """Sum loss and statistics over the stages; the loss is zero in all stages but the last."""
        if self._run.group is not None:
            all_reduce(loss, "the loss over stages", group=self._run.group)
        layers: LayersOfStages = self.model.layers_of_stages  # type: ignore[assignment]
        sums = layers.all_reduce({path: recorded.take() for path, recorded in self._recorded.items()})
        aux_loss, stats = torch.zeros_like(loss), {}
        for path, total in sums.items():
            _, total_aux_loss, stats[path] = unpacked(*total)
            aux_loss = aux_loss + total_aux_loss * self._aux_loss_scale
        return PipelineOutput(loss, aux_loss, stats)
