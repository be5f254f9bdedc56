"""Record of the load of the experts over a training run."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from maxmoe.checks.fields import check_int
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.windows import NUM_WINDOWS, LoadWindows
from maxmoe.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Number of steps that are kept as they were added before they are summarized on their device.
CHUNK = 64


class LayerLoad(NamedTuple):
    """Load of the experts of one layer in one optimizer step.

    Attributes:
        step: number of the optimizer step, from 1.
        layer: path of the layer in the model.
        load_max_over_mean: largest load of an expert divided by the mean load: 1 if balanced, at most E / K.
        load_min_over_mean: smallest load of an expert divided by the mean load: 1 if balanced, 0 for a dead expert.
        dead_experts: number of experts that received no token.
        router_entropy: mean entropy of the normalised scores in nats, at most log(E).
        dropped: number of slots dropped by capacity_factor or buffer_factor.
        busiest_expert: id of the expert with the largest load, the lowest id among equal loads.
        idlest_expert: id of the expert with the smallest load, the lowest id among equal loads.
    """

    step: int
    layer: str
    load_max_over_mean: float
    load_min_over_mean: float
    dead_experts: int
    router_entropy: float
    dropped: int
    busiest_expert: int
    idlest_expert: int


VALUES = LayerLoad._fields[2:]  # without step and layer


class SummaryWriter(Protocol):
    """What `LoadHistory` calls of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        """Add a value of a step."""
        ...


class Run(Protocol):
    """What `LoadHistory` calls of a run of Weights & Biases, which `wandb.init` returns."""

    def define_metric(self, name: str, step_metric: str) -> Any:
        """Choose the horizontal axis of metrics."""
        ...

    def log(self, data: dict[str, Any]) -> Any:
        """Log the values of a step."""
        ...


class LoadHistory:
    """Load of the experts of every layer in every optimizer step of a run.

    `add` waits for no device: it keeps the counts there, and summarizes them there. All other methods wait for them::

        history = maxmoe.expert_load.LoadHistory()
        for batch in batches:
            ...
            history.add(accumulator.update().layers)
        history.write_csv("load.csv")
        history.heat_map().savefig("load.png")

    A step takes 56 bytes per layer. For the heat map, counts are summed over at most 100 windows of steps, however long
    the run is. The record of a run that is resumed is saved with its checkpoint, by `state_dict`.

    Args:
        num_steps: number of steps before the first one of this record, for a run that is resumed without its record.
        tokens_per_expert: `tokens_per_expert` of the record of the run that is resumed; None for no counts.

    Raises:
        ValueError: for a negative `num_steps`, and if `tokens_per_expert` has another number of windows or is not
            integer.
    """

    NUM_WINDOWS = NUM_WINDOWS

    def __init__(self, *, num_steps: int = 0, tokens_per_expert: Mapping[str, Tensor] | None = None) -> None:
        check_int("num_steps", num_steps, at_least=0)
        windows = {}
        for layer, counts in (tokens_per_expert or {}).items():
            if counts.dim() != 2 or len(counts) != NUM_WINDOWS:
                raise ValueError(
                    f"tokens_per_expert must have shape [{NUM_WINDOWS}, E] for each layer, "
                    f"got {tuple(counts.shape)} for {layer!r}"
                )
            if counts.is_floating_point():
                raise ValueError(f"tokens_per_expert must be integer, got {counts.dtype} for {layer!r}")
            windows[layer] = counts.long()
        self._windows = LoadWindows(num_steps, windows)
        self._num_experts = {layer: counts.shape[1] for layer, counts in windows.items()}
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._first_step = num_steps + 1
        self._values: list[Tensor] = []  # of consecutive steps, (N, M, len(VALUES)) each

    @property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        return self._windows.num_steps + len(self._pending)

    @property
    def window(self) -> int:
        """Steps per window: the smallest power of two for which 100 windows are enough."""
        return LoadWindows.length(self.num_steps)

    @property
    def tokens_per_expert(self) -> dict[str, Tensor]:
        """Tokens of each expert ``(100, E)``, int64, by layer, summed over windows of steps; 0 in future windows."""
        self._summarize()
        return dict(self._windows.tokens_per_expert)

    def add(self, layers: Mapping[str, MoEStats]) -> None:
        """Add the statistics of an optimizer step.

        Args:
            layers: statistics of each layer by its path: `StepStats.layers`, from `StatsAccumulator.update`, or
                `PipelineOutput.stats`.

        Raises:
            ValueError: if there are no layers, or other layers or numbers of experts than in the first step.
        """
        num_experts = {layer: stats.tokens_per_expert.numel() for layer, stats in layers.items()}
        known = self._num_experts or num_experts
        if not num_experts or num_experts != known:
            raise ValueError(f"layers must be the same in every step, with {known} experts, got {num_experts}")
        self._num_experts = known
        in_order = [layers[layer] for layer in known]
        counts = torch.cat([stats.tokens_per_expert for stats in in_order])
        dropped = torch.stack([stats.dropped for stats in in_order])
        self._pending.append((counts, dropped, torch.stack([stats.router_entropy for stats in in_order])))
        if len(self._pending) == CHUNK:
            self._summarize()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole record, for `torch.save` or `torch.distributed.checkpoint`.

        Returns:
            Number of steps, `tokens_per_expert`, and the values of each step and layer, ``(N, M, 7)``, float64; tensors
            are on the CPU.
        """
        values = self._read_values()
        counts = {layer: counts.cpu() for layer, counts in self.tokens_per_expert.items()}
        return {"num_steps": self.num_steps, "tokens_per_expert": counts, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the record by a saved one, after which the steps of a resumed run are added.

        Args:
            state: result of `state_dict`.

        Raises:
            ValueError: as the constructor, and for values of another shape.
        """
        record = LoadHistory(num_steps=state["num_steps"], tokens_per_expert=state["tokens_per_expert"])
        values, num_layers = state["values"], len(record._num_experts)
        if values.dim() != 3 or values.shape[1:] != (num_layers, len(VALUES)) or len(values) > record.num_steps:
            raise ValueError(
                f"values must have shape [N, {num_layers}, {len(VALUES)}] for N of {record.num_steps} steps, "
                f"got {tuple(values.shape)}"
            )
        record._values, record._first_step = [values] * bool(len(values)), record.num_steps - len(values) + 1
        vars(self).update(vars(record))

    def rows(self, *, after: int = 0) -> list[LayerLoad]:
        """Return the load of each layer in each step, in the order of the steps.

        Args:
            after: step up to which steps are left out.
        """
        start = max(after + 1 - self._first_step, 0)
        found = []
        for step, of_layers in enumerate(self._read_values()[start:].tolist(), self._first_step + start):
            for layer, values in zip(self._num_experts, of_layers, strict=True):
                most, least, dead, entropy, dropped, busiest, idlest = values
                counts = (int(count) for count in (dropped, busiest, idlest))
                found.append(LayerLoad(step, layer, most, least, int(dead), entropy, *counts))
        return found

    def scalars(self, *, after: int = 0) -> dict[int, dict[str, float]]:
        """Return the values of each step by name and layer, such as "load_max_over_mean/layers.3.mlp".

        Args:
            after: step up to which steps are left out.
        """
        steps: dict[int, dict[str, float]] = {}
        for row in self.rows(after=after):
            values = {f"{name}/{row.layer}": getattr(row, name) for name in VALUES}
            steps.setdefault(row.step, {}).update(values)
        return steps

    def write_csv(self, path: Path | str) -> None:
        """Write a row for each step and layer, with the fields of `LayerLoad` as columns.

        Args:
            path: file to write; an existing file is replaced.
        """
        with replacing(path) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(LayerLoad._fields)
            writer.writerows(self.rows())

    def write_tensorboard(self, writer: SummaryWriter, *, after: int = 0) -> None:
        """Add the `scalars` of the steps to TensorBoard.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`.
            after: step up to which the steps have been written already.
        """
        for step, values in self.scalars(after=after).items():
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

    def write_wandb(self, run: Run, *, after: int = 0) -> None:
        """Log the `scalars` of the steps to Weights & Biases.

        The horizontal axis of the values is "optimizer_step", so that other values can be logged in between.

        Args:
            run: the run that `wandb.init` returns.
            after: step up to which the steps have been written already.
        """
        for name in VALUES:
            run.define_metric(f"{name}/*", step_metric="optimizer_step")
        for step, values in self.scalars(after=after).items():
            run.log({"optimizer_step": step, **values})

    def heat_map(self) -> "Figure":
        """Draw the load of each expert over time, divided by the mean over experts, in one panel per layer.

        Windows of steps in which an expert got no token have a color of their own. Needs matplotlib.

        Returns:
            `matplotlib.figure.Figure`, which has the method `savefig`.

        Raises:
            ValueError: if no step was added.
        """
        from maxmoe.expert_load.heat_map import heat_map

        if not self.num_steps or not self.tokens_per_expert:
            raise ValueError("heat_map needs at least one step, got 0: call add first")
        num_windows = -(-self.num_steps // self.window)
        counts = {layer: counts[:num_windows].cpu() for layer, counts in self.tokens_per_expert.items()}
        return heat_map(counts, self.window, self.num_steps)

    def _read_values(self) -> Tensor:
        """Return the values of all steps ``(N, M, len(VALUES))`` on the CPU."""
        self._summarize()
        if not self._values:
            return torch.empty(0, len(self._num_experts), len(VALUES), dtype=torch.float64)
        self._values = [torch.cat([values.cpu() for values in self._values])]
        return self._values[0]

    def _summarize(self) -> None:
        """Replace the pending statistics by the values of `LayerLoad` and add their counts to the windows."""
        if not self._pending:
            return
        counts, dropped, entropy = (torch.stack(parts) for parts in zip(*self._pending, strict=True))
        self._pending.clear()
        loads = torch.split(counts, list(self._num_experts.values()), dim=1)
        self._windows.add(dict(zip(self._num_experts, loads, strict=True)), len(counts))
        layers = zip(loads, dropped.unbind(1), entropy.unbind(1), strict=True)
        self._values.append(torch.stack([_values(*layer) for layer in layers], 1))


def _values(load: Tensor, dropped: Tensor, entropy: Tensor) -> Tensor:
    """Summarize the loads ``(N, E)`` of one layer in N steps as ``(N, len(VALUES))``, float64."""
    least, idlest = load.min(1)
    most, busiest = load.max(1)
    mean = load.double().mean(1).clamp_min(1e-20)
    values = (most / mean, least / mean, (load == 0).sum(1), entropy, dropped, busiest, idlest)
    return torch.stack([value.double() for value in values], 1)
