"""LoadHistory: every step is recorded without waiting for a device, and written files can be read back."""

import csv
import io
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe import MoEStats
from maxmoe.expert_load import LayerLoad, LoadHistory
from maxmoe.expert_load.stats import BoundedMoEStats

NUM_EXPERTS = {"layers.0.mlp": 4, "layers.1.mlp": 7}


def statistics(generator: torch.Generator, device: str = "cpu") -> dict[str, MoEStats]:
    found = {}
    for layer, num_experts in NUM_EXPERTS.items():
        load = torch.randint(0, 5, (num_experts,), generator=generator)
        dropped, entropy = torch.randint(9, (), generator=generator), torch.rand((), generator=generator)
        found[layer] = MoEStats(load.to(device), dropped.to(device), entropy.to(device))
        if num_experts == 7:  # with a buffer
            factor = torch.rand((), generator=generator, dtype=torch.float64) + 1
            of_buffer = {"required_buffer_factor": factor.to(device), "overflowed": dropped.to(device)}
            found[layer] = BoundedMoEStats(*found[layer], **of_buffer)
    return found


def recorded(num_steps: int) -> tuple[LoadHistory, list[dict[str, MoEStats]]]:
    history, generator = LoadHistory(), torch.Generator().manual_seed(0)
    steps = [statistics(generator) for _ in range(num_steps)]
    for layers in steps:
        history.add(layers)
    return history, steps


def by_hand(step: int, layer: str, stats: MoEStats) -> LayerLoad:
    """The rows of a history, computed with lists."""
    load: list[int] = stats.tokens_per_expert.tolist()
    most, least, mean = max(load), min(load), sum(load) / len(load)
    return LayerLoad(
        step,
        layer,
        load_max_over_mean=most / mean,
        load_min_over_mean=least / mean,
        dead_experts=load.count(0),
        router_entropy=float(stats.router_entropy),
        dropped=int(stats.dropped),
        busiest_expert=load.index(most),
        idlest_expert=load.index(least),
        required_buffer_factor=float(getattr(stats, "required_buffer_factor", 0.0)),
        overflowed=int(getattr(stats, "overflowed", 0)),
    )


@pytest.mark.parametrize("num_steps", [1, 150])
def test_rows_are_the_statistics_of_each_step(num_steps: int) -> None:
    history, steps = recorded(num_steps - 1)
    history.rows()  # may be read in between
    (more,) = recorded(num_steps)[1][num_steps - 1 :]
    history.add(more)
    steps.append(more)
    expected = [by_hand(n, layer, stats) for n, layers in enumerate(steps, 1) for layer, stats in layers.items()]
    for row, other in zip(history.rows(), expected, strict=True):
        assert row[:2] == other[:2] and row[2:] == pytest.approx(other[2:])
    assert history.rows() == history.rows() and history.num_steps == num_steps
    for row, stats in zip(history.rows(), (stats for layers in steps for stats in layers.values()), strict=True):
        assert row.load_max_over_mean == pytest.approx(float(stats.load_max_over_mean))
        assert row.dead_experts / NUM_EXPERTS[row.layer] == pytest.approx(float(stats.dead_expert_fraction))
        assert type(row.busiest_expert) is int and type(row.dropped) is int
    assert history.rows(after=num_steps - 1) == history.rows()[-2:] and history.rows(after=num_steps) == []


def test_add_waits_for_no_device() -> None:
    """Meta tensors have no values: a wait for one raises an error."""
    history, generator = LoadHistory(), torch.Generator().manual_seed(0)
    for _ in range(130):
        history.add(statistics(generator, "meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        history.rows()


@pytest.mark.parametrize(
    ("steps", "window", "resumed_after"),
    [(1, 1, 0), (100, 1, 1), (101, 2, 0), (200, 2, 130), (201, 4, 130), (400, 4, 1), (801, 16, 130)],
)
def test_the_load_is_summed_over_windows_that_depend_on_the_steps_done(
    steps: int, window: int, resumed_after: int
) -> None:
    history, counts = LoadHistory(), torch.randint(0, 9, (steps, 2))
    nothing = torch.zeros(())
    for step in range(steps):
        if step == resumed_after:
            windows = history.tokens_per_expert
            history = LoadHistory()
            history.load_state_dict({"num_steps": step, "tokens_per_expert": windows})
        history.add({"moe": MoEStats(counts[step], nothing, nothing)})
    assert history.window == window and history.num_steps == steps
    expected = [part.sum(0) for part in counts.split(window)]
    windows = history.tokens_per_expert["moe"]
    assert windows.shape == (100, 2) and windows.dtype == torch.int64  # type: ignore[attr-defined]
    assert torch.equal(windows[: len(expected)], torch.stack(expected)) and not windows[len(expected) :].any()
    if resumed_after < steps:
        assert [row.step for row in history.rows()] == [*range(resumed_after + 1, steps + 1)]


@pytest.mark.parametrize("resumed_after", [0, 130])
def test_a_resumed_record_has_the_rows_of_all_steps(resumed_after: int, tmp_path: Path) -> None:
    whole, steps = recorded(200)
    first, _ = recorded(resumed_after)
    torch.save(first.state_dict(), tmp_path / "load.pt")
    resumed = LoadHistory()
    resumed.load_state_dict(torch.load(tmp_path / "load.pt"))
    for layers in steps[resumed_after:]:
        resumed.add(layers)
    for name, history in (("whole", whole), ("resumed", resumed)):
        history.write_csv(tmp_path / name)
    assert (tmp_path / "resumed").read_text() == (tmp_path / "whole").read_text()
    assert resumed.num_steps == 200 and resumed.rows(after=198) == whole.rows()[-4:]
    assert all(counts.equal(whole.tokens_per_expert[layer]) for layer, counts in resumed.tokens_per_expert.items())


def test_rows_of_other_layers_are_refused() -> None:
    state = recorded(3)[0].state_dict()
    history = LoadHistory()
    with pytest.raises(ValueError, match=r"^values must have shape \[N, 2, 9\] for N of 3 steps, got \(3, 1, 9\)$"):
        history.load_state_dict({**state, "values": state["values"][:, :1]})
    assert history.num_steps == 0


def test_other_layers_are_refused() -> None:
    history, steps = recorded(1)
    with pytest.raises(ValueError, match=r"^layers must be the same in every step, with \{'layers.0.mlp': 4, .* got"):
        history.add({"layers.0.mlp": steps[0]["layers.0.mlp"]})
    swapped = dict(zip(steps[0], reversed(steps[0].values()), strict=True))
    with pytest.raises(ValueError, match=r"got \{'layers.0.mlp': 7, .*: after surgery, .* LoadHistory\(num_steps=1\)$"):
        history.add(swapped)
    after_surgery = LoadHistory(num_steps=1)
    after_surgery.add(swapped)
    assert [row.step for row in after_surgery.rows()] == [2, 2]
    with pytest.raises(ValueError, match=r"got \{\}$"):
        LoadHistory().add({})
    history.add({layer: steps[0][layer] for layer in reversed(steps[0])})  # in any order
    assert [row._replace(step=1) for row in history.rows(after=1)] == history.rows()[:2]


def test_counts_that_were_read_stay() -> None:
    history, steps = recorded(3)
    counts = history.tokens_per_expert
    before = {layer: tensor.clone() for layer, tensor in counts.items()}
    history.add(steps[0])
    assert not history.tokens_per_expert["layers.0.mlp"].equal(before["layers.0.mlp"])
    assert all(counts[layer].equal(tensor) for layer, tensor in before.items())


def test_a_resumed_record_needs_its_windows() -> None:
    for counts in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(100, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"shape \[100, E\] for each layer, got \{'moe': \("):
            LoadHistory().load_state_dict({"num_steps": 3, "tokens_per_expert": {"moe": counts}})
    with pytest.raises(ValueError, match=r"tokens_per_expert must be integer, got torch.float32 for 'moe'$"):
        LoadHistory().load_state_dict({"num_steps": 3, "tokens_per_expert": {"moe": torch.zeros(100, 4)}})
    with pytest.raises(ValueError, match=r"num_steps must be an int >= 0, got -5$"):
        LoadHistory().load_state_dict({"num_steps": -5, "tokens_per_expert": {}})
    for num_steps in (-5, 1.5):
        with pytest.raises(ValueError, match=rf"num_steps must be an int >= 0, got {num_steps}$"):
            LoadHistory(num_steps=num_steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^heat_map needs at least one step, got 0: call add first$"):
        LoadHistory().heat_map()


def test_a_training_on_record(tmp_path: Path) -> None:
    config = maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2)
    model = torch.nn.Sequential(maxmoe.MoEFeedForward(config), maxmoe.MoEFeedForward(config))
    accumulator, history = maxmoe.StatsAccumulator(model), LoadHistory()
    for _ in range(3):
        model(torch.randn(2, 5, 8)).sum().backward()
        history.add(accumulator.update().layers)
    history.write_csv(tmp_path / "load.csv")
    with (tmp_path / "load.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*LayerLoad._fields] and len(rows) == 6
    for written, row in zip(rows, history.rows(), strict=True):
        values = [type(value)(text) for text, value in zip(written, row, strict=True)]  # type: ignore[call-arg]
        assert values == [*row]
        assert 1 <= row.load_max_over_mean <= 2 and 0 < row.router_entropy <= math.log(4) + 1e-6
    assert {counts.sum().item() for counts in history.tokens_per_expert.values()} == {3 * 2 * 5 * 2}


def test_scalars_have_the_rows_by_name_and_layer() -> None:
    history, _ = recorded(5)
    for after in (0, 3):
        found: dict[int, dict[str, float]] = {step: {} for step in range(after + 1, 6)}
        for row in history.rows(after=after):
            found[row.step] |= {f"{name}/{row.layer}": getattr(row, name) for name in LayerLoad._fields[2:]}
        assert history.scalars(after=after) == found


def test_heat_map() -> None:
    """A panel for each layer, with the load of each expert in each window divided by the mean."""
    pytest.importorskip("matplotlib", reason="heat maps are drawn by it")
    history, steps = recorded(130)
    figure = history.heat_map()
    figure.savefig(io.BytesIO())
    panels = [axes for axes in figure.axes if axes.images]
    factor = max(row.required_buffer_factor for row in history.rows())
    first, second = NUM_EXPERTS
    assert [axes.get_title() for axes in panels] == [first, f"{second}, buffer factor {factor:.2f} required"]
    assert panels[0].get_xlim() == (0, 130)
    for axes, (layer, num_experts) in zip(panels, NUM_EXPERTS.items(), strict=True):
        assert axes.get_ylim() == (num_experts - 0.5, -0.5)
        counts: Tensor = torch.stack([layers[layer].tokens_per_expert for layers in steps]).unflatten(0, (65, 2)).sum(1)
        expected = (counts / counts.double().mean(1, keepdim=True)).T
        torch.testing.assert_close(torch.tensor(axes.images[0].get_array()), expected)
