"""`examples/balancing.py`: every method trains, results are cached, and specialisation is mutual information."""

import json
from pathlib import Path

import pytest
import torch

import balancing
from examples.pretrain_run import TINY
from load_balancing.training import WAYS, mutual_information
from pretraining import InputError


def test_every_way_trains_once(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = [*TINY, "--num-layers", "1", "--steps", "4", "--learning-rate", "0.03"]
    arguments = [*tiny, "--data", str(text), "--out", str(tmp_path / "out"), "--seeds", "3"]
    assert balancing.run(balancing.parse_options(arguments)) == 0
    results = json.loads((tmp_path / "out/balancing.json").read_text())
    table = (tmp_path / "out/balancing.md").read_text()
    assert table in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == [*balancing.COLUMNS] and [row[0] for row in rows[2:]] == [*WAYS]
    assert all(5 < float(row[1]) < 9 for row in rows[2:])
    assert len({one["held_out"][-1][1] for one in results["runs"]}) == len(WAYS)  # they differ
    assert (tmp_path / "out/balancing.png").exists()
    again = balancing.parse_options([*arguments, "0", "--ways", "sign"])
    assert balancing.run(again) == 0
    *kept, other_seed = json.loads((tmp_path / "out/balancing.json").read_text())["runs"]
    assert kept == results["runs"] and (other_seed["way"], other_seed["seed"]) == ("sign", 0)
    longer = balancing.parse_options([*arguments, "--steps", "9"])
    with pytest.raises(InputError, match=r"balancing.json has results of other options: choose another --out"):
        balancing.run(longer)


def test_mutual_information() -> None:
    assert mutual_information(torch.ones(8, 4)) == pytest.approx(0, abs=1e-12)
    assert mutual_information(3 * torch.eye(8)) == pytest.approx(3)
    assert mutual_information(torch.tensor([[1.0, 0.0], [1.0, 2.0]])) == pytest.approx(0.311278, abs=1e-6)
