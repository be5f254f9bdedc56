"""The pictures of `examples/pretrain.py`."""

from pathlib import Path

from pretraining import figures
from support.png import share


def test_a_picture_of_one_step(tmp_path: Path) -> None:
    figures.loss_curves(tmp_path / "loss.png", [8.0], {"held-out text": [(1, 3.0)]}, {"byte bigram": 3.5})
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_the_curve_of_another_run_is_drawn_too(tmp_path: Path) -> None:
    curves = {"muon": [(1, 4.0), (9, 3.0)], "adamw of $_{x": [(1, 4.5), (9, 3.9)]}
    for number in (1, 2):
        held_out = dict([*curves.items()][:number])
        figures.loss_curves(tmp_path / f"{number}.png", [8.0] * 9, held_out, {"byte bigram": 3.5})
    assert share(tmp_path / "1.png", figures.OTHER) == 0 < share(tmp_path / "2.png", figures.OTHER)
