"""The pictures of `examples/pretrain.py`."""

from pathlib import Path

import pytest
import torch

from pretraining import figures


@pytest.mark.parametrize(("layers", "experts", "windows"), [(1, 3, 1), (3, 8, 20), (4, 16, 100)])
def test_pictures_of_any_number_of_layers(tmp_path: Path, layers: int, experts: int, windows: int) -> None:
    counts = torch.randint(0, 9, (windows, layers, experts))
    figures.expert_load(tmp_path / "load.png", counts, 300)
    figures.loss_curves(tmp_path / "loss.png", [8.0], [(1, 3.0)], {"byte bigram": 3.5})
    assert (tmp_path / "load.png").stat().st_size > 5000 and (tmp_path / "loss.png").stat().st_size > 5000
