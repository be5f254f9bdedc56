"""The pictures of `examples/pretrain.py`."""

from pathlib import Path

import pytest
import torch

from pretraining import figures
from support.png import share


@pytest.mark.parametrize(("layers", "experts", "windows"), [(1, 3, 1), (3, 8, 20), (4, 16, 100)])
def test_pictures_of_any_number_of_layers(tmp_path: Path, layers: int, experts: int, windows: int) -> None:
    counts = torch.randint(0, 9, (windows, layers, experts))
    figures.expert_load(tmp_path / "load.png", counts, 16, 16 * windows - 5)
    figures.loss_curves(tmp_path / "loss.png", [8.0], {"held-out text": [(1, 3.0)]}, {"byte bigram": 3.5})
    assert (tmp_path / "load.png").stat().st_size > 5000 and (tmp_path / "loss.png").stat().st_size > 5000


def test_the_curve_of_another_run_is_drawn_too(tmp_path: Path) -> None:
    curves = {"muon": [(1, 4.0), (9, 3.0)], "adamw of $_{x": [(1, 4.5), (9, 3.9)]}
    for number in (1, 2):
        held_out = dict([*curves.items()][:number])
        figures.loss_curves(tmp_path / f"{number}.png", [8.0] * 9, held_out, {"byte bigram": 3.5})
    assert share(tmp_path / "1.png", figures.OTHER) == 0 < share(tmp_path / "2.png", figures.OTHER)


def test_an_expert_without_tokens_has_a_color_of_its_own(tmp_path: Path) -> None:
    """A single token is drawn as the least load, and none at all in yellow."""
    counts = torch.full((10, 1, 4), 1000)
    pictures = {}
    for tokens in (1, 0):
        counts[:, 0, 2] = tokens
        figures.expert_load(tmp_path / f"{tokens}.png", counts, 1, 10)
        pictures[tokens] = share(tmp_path / f"{tokens}.png", "gold")
    assert pictures[1] < 0.03 and pictures[0] > pictures[1] + 0.1
