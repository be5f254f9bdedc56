"""The heat map of the load of each expert over time."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="heat maps are drawn by it")

from maxmoe.expert_load.heat_map import heat_map
from support.png import share


@pytest.mark.parametrize(("layers", "experts", "windows"), [(1, 3, 1), (4, 16, 100)])
def test_any_number_of_layers(tmp_path: Path, layers: int, experts: int, windows: int) -> None:
    counts = {f"layers.{layer}": torch.randint(0, 9, (windows, experts)) for layer in range(layers)}
    figure = heat_map(counts, 16, 16 * windows - 5)
    figure.savefig(tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 5000
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == [*counts]
    for axes, expected in zip(panels, counts.values(), strict=True):
        assert axes.get_xlim() == (0, 16 * windows - 5) and axes.get_ylim() == (experts - 0.5, -0.5)
        drawn = torch.tensor(axes.images[0].get_array())
        torch.testing.assert_close(drawn, (expected / expected.double().mean(1, keepdim=True)).T)


def test_layers_with_different_numbers_of_experts_have_a_scale_each() -> None:
    panels = heat_map({"first": torch.ones(5, 3), "second": torch.ones(5, 8)}, 1, 5).axes
    assert [axes.get_ylim() for axes in panels[:2]] == [(2.5, -0.5), (7.5, -0.5)]


def test_an_expert_without_tokens_has_a_color_of_its_own(tmp_path: Path) -> None:
    """One token is drawn with the color of the least load, no token in yellow."""
    counts = torch.full((10, 4), 1000)
    pictures = {}
    for tokens in (1, 0):
        counts[:, 2] = tokens
        heat_map({"moe": counts}, 1, 10).savefig(tmp_path / f"{tokens}.png")
        pictures[tokens] = share(tmp_path / f"{tokens}.png", "gold")
    assert pictures[1] < 0.03 and pictures[0] > pictures[1] + 0.1
