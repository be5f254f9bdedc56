"""Record of the load of the experts over a training run."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxmoe.checks.fields import check_int
from maxmoe.expert_load.stats import BoundedMoEStats, MoEStats
from maxmoe.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_WINDOWS = 100  # of steps over which counts are summed


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
        required_buffer_factor: least buffer_factor that would not have overflowed in any call; 0 without a buffer
            whose overflow is computed in chunks, or if the rows always fit.
        overflowed: number of calls whose rows were computed in several chunks.
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
    required_buffer_factor: float
    overflowed: int


VALUES = LayerLoad._fields[2:]  # without step and layer
KINDS = [LayerLoad.__annotations__[name] for name in VALUES]  # int or float


class LoadHistory:
    """Load of the experts of every layer in every optimizer step of a run.

    `add` waits for no device: it summarizes the counts where they are. All other methods wait for them::

        history = maxmoe.expert_load.LoadHistory()
        for batch in batches:
            ...
            history.add(accumulator.update().layers)
        history.write_csv("load.csv")
        history.heat_map().savefig("load.png")

    A step takes 72 bytes per layer. For the heat map, counts are summed over at most 100 windows of steps, however long
    the run is. The record of a run that is resumed is saved with its checkpoint, by `state_dict`.

    Args:
        num_steps: number of steps before the first one of this record, for a run that is resumed without its record.

    Attributes:
        num_steps: number of steps of the run.

    Raises:
        ValueError: for a negative `num_steps`.
    """

    def __init__(self, *, num_steps: int = 0) -> None:
        check_int("num_steps", num_steps, at_least=0)
        self.num_steps = num_steps
        self._num_experts: dict[str, int] = {}  # of each layer
        self._first_step = num_steps + 1  # of the values
        self._values: Tensor | None = None  # (N, M, len(VALUES)), with place for later steps
        self._windows: Tensor | None = None  # counts of the experts of all layers, (NUM_WINDOWS, sum of E)

    @property
    def window(self) -> int:
        """Steps per window: the smallest power of two for which 100 windows are enough."""
        return 1 << (max(0, self.num_steps - 1) // NUM_WINDOWS).bit_length()

    @property
    def tokens_per_expert(self) -> dict[str, Tensor]:
        """Tokens of each expert ``(100, E)``, int64, by layer, summed over windows of steps; 0 in future windows."""
        if self._windows is None:
            return {}
        counts = torch.split(self._windows.clone(), [*self._num_experts.values()], dim=1)
        return dict(zip(self._num_experts, counts, strict=True))

    def add(self, layers: Mapping[str, MoEStats | BoundedMoEStats]) -> None:
        """Add the statistics of an optimizer step.

        Args:
            layers: statistics of each layer by its path: `StepStats.layers`, from `StatsAccumulator.update`, or
                `PipelineOutput.stats`.

        Raises:
            ValueError: if there are no layers, or other layers or numbers of experts than in the first step, as after
                surgery.
        """
        num_experts = {layer: stats.tokens_per_expert.numel() for layer, stats in layers.items()}
        known = self._num_experts or num_experts
        if not num_experts or num_experts != known:
            message = f"layers must be the same in every step, with {known} experts, got {num_experts}"
            if num_experts.keys() == known.keys() and num_experts:
                message += f": after surgery, begin another record with LoadHistory(num_steps={self.num_steps})"
            raise ValueError(message)
        self._num_experts = known
        self._add_to_windows(torch.cat([layers[layer].tokens_per_expert for layer in known]))
        self._add_values(torch.stack([_values(layers[layer]) for layer in known]))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole record, for `torch.save` or `torch.distributed.checkpoint`.

        Returns:
            Number of steps, `tokens_per_expert`, and the values of each step and layer, ``(N, M, 9)``, float64; tensors
            are on the CPU.
        """
        counts = {layer: counts.cpu() for layer, counts in self.tokens_per_expert.items()}
        return {"num_steps": self.num_steps, "tokens_per_expert": counts, "values": self._read_values().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the record by a saved one, after which the steps of a resumed run are added.

        Args:
            state: result of `state_dict`. Without "values", the rows begin with the next step.

        Raises:
            ValueError: for tensors of other shapes, counts that are not integers, and a negative `num_steps`.
        """
        num_steps, windows = state["num_steps"], state["tokens_per_expert"]
        check_int("num_steps", num_steps, at_least=0)
        values = state.get("values", torch.empty(0, len(windows), len(VALUES), dtype=torch.float64))
        shapes = {layer: tuple(counts.shape) for layer, counts in windows.items()}
        if any(len(shape) != 2 or shape[0] != NUM_WINDOWS for shape in shapes.values()):
            raise ValueError(f"tokens_per_expert must have shape [{NUM_WINDOWS}, E] for each layer, got {shapes}")
        for layer, counts in windows.items():
            if counts.is_floating_point():
                raise ValueError(f"tokens_per_expert must be integer, got {counts.dtype} for {layer!r}")
        if values.shape[1:] != (len(windows), len(VALUES)) or len(values) > num_steps:
            raise ValueError(
                f"values must have shape [N, {len(windows)}, {len(VALUES)}] for N of {num_steps} steps, "
                f"got {tuple(values.shape)}"
            )
        self.num_steps, self._first_step = num_steps, num_steps - len(values) + 1
        self._num_experts = {layer: shape[1] for layer, shape in shapes.items()}
        self._values = values if len(values) else None
        self._windows = torch.cat([*windows.values()], 1) if windows else None

    def rows(self, *, after: int = 0) -> list[LayerLoad]:
        """Return the load of each layer in each step, in the order of the steps.

        Args:
            after: step up to which steps are left out.
        """
        first, found = max(after + 1, self._first_step), []
        for step, of_layers in enumerate(self._read_values(first).tolist(), first):
            for layer, values in zip(self._num_experts, of_layers, strict=True):
                found.append(LayerLoad(step, layer, *(kind(value) for kind, value in zip(KINDS, values, strict=True))))
        return found

    def scalars(self, *, after: int = 0) -> dict[int, dict[str, float]]:
        """Return the values of each step by name and layer, such as "load_max_over_mean/layers.3.mlp".

        Args:
            after: step up to which steps are left out.
        """
        steps: dict[int, dict[str, float]] = {}
        for row in self.rows(after=after):
            steps.setdefault(row.step, {}).update({f"{name}/{row.layer}": getattr(row, name) for name in VALUES})
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

    def heat_map(self) -> "Figure":
        """Draw the load of each expert over time, divided by the mean over experts, in one panel per layer.

        Windows of steps in which an expert got no token have a color of their own. The title of a layer with a buffer
        whose overflow is computed in chunks has the largest `required_buffer_factor`. Needs matplotlib.

        Returns:
            `matplotlib.figure.Figure`, which has the method `savefig`.

        Raises:
            ValueError: if no step was added.
        """
        from maxmoe.expert_load.heat_map import heat_map

        if self._windows is None:
            raise ValueError("heat_map needs at least one step, got 0: call add first")
        num_windows = -(-self.num_steps // self.window)
        counts = {layer: counts[:num_windows].cpu() for layer, counts in self.tokens_per_expert.items()}
        required = self._read_values()[:, :, VALUES.index("required_buffer_factor")]
        factors = torch.cat([required.new_zeros(1, len(counts)), required]).amax(0).tolist()
        return heat_map(counts, self.window, self.num_steps, dict(zip(self._num_experts, factors, strict=True)))

    def _add_to_windows(self, counts: Tensor) -> None:
        """Add the counts ``(sum of E,)`` of the next step; windows are merged in pairs where they are not enough."""
        before, self.num_steps = self.window, self.num_steps + 1
        if self._windows is None:
            self._windows = counts.new_zeros(NUM_WINDOWS, len(counts))
        elif self.window > before:
            merged = self._windows[::2] + self._windows[1::2]
            self._windows = torch.cat([merged, torch.zeros_like(merged)])
        self._windows = self._windows.to(counts.device)
        self._windows[(self.num_steps - 1) // self.window] += counts

    def _add_values(self, values: Tensor) -> None:
        """Add the values ``(M, len(VALUES))`` of the current step; the memory grows by doubling."""
        old, index = self._values, self.num_steps - self._first_step
        if old is None or index == len(old) or old.device != values.device:
            self._values = values.new_empty(max(64, 2 * index), *values.shape)
            if old is not None:
                self._values[:index] = old[:index]
        self._values[index] = values  # type: ignore[index]

    def _read_values(self, first_step: int = 0) -> Tensor:
        """Return the values from a step on, ``(N, M, len(VALUES))``, on the CPU."""
        if self._values is None:
            return torch.empty(0, len(self._num_experts), len(VALUES), dtype=torch.float64)
        start = max(first_step - self._first_step, 0)
        return self._values[start : self.num_steps - self._first_step + 1].cpu()


def _values(stats: MoEStats | BoundedMoEStats) -> Tensor:
    """Return the VALUES of a layer in one step as ``(len(VALUES),)``, float64."""
    load = stats.tokens_per_expert
    least, idlest = load.min(0)
    most, busiest = load.max(0)
    mean = load.double().mean().clamp_min(1e-20)
    values = (most / mean, least / mean, (load == 0).sum(), stats.router_entropy, stats.dropped, busiest, idlest)
    of_buffer = stats[3:] or (load.new_zeros(()), load.new_zeros(()))
    return torch.stack([value.double() for value in (*values, *of_buffer)])
