"""`examples/muon_sharding.py`: the losses of one process, and the collectives of Muon where matrices are in parts."""

from pathlib import Path

import pytest

import muon_sharding
from support.pretrain_run import words

MIB = 2**20


@pytest.mark.slow
def test_all_shardings_have_the_losses_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = words(tmp_path / "text"), tmp_path / "out"
    sizes = ["--ranks", "2", "--steps", "3", "--batch-size", "2", "--sequence-length", "8"]
    options = muon_sharding.parse_options([*sizes, "--data", str(data), "--out", str(out)])
    assert muon_sharding.run(options) == 0
    table = (out / "muon_sharding.md").read_text()
    assert table in capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = {name: cells for name, *cells in lines[2:]}
    loss, *_ = rows["one process"]
    assert [*rows] == ["one process", "shard-exp-on-fsdp, FSDP2", "ep-as-dp, EP2", "pure-fsdp, FSDP2"]
    for name, (same_loss, apart, step_time, muon_time, *_) in rows.items():
        assert same_loss == loss and float(apart or 0) < 1e-12, name
        assert float(step_time.replace(",", "")) > float(muon_time.replace(",", "")) > 0, name
    collectives = {name: (cells[-1], float(cells[-2])) for name, cells in rows.items()}
    # D = 128, 3 layers of 4 attention matrices; dense 3 x 256 D, 2 layers of shared experts with 3 x 64 D. To its one
    # owner goes half of a matrix, and half of the result comes back; a rank sends half of all: 8 bytes / 2 in all.
    matrices = 3 * 4 * 128 * 128 + 3 * 256 * 128 + 2 * 3 * 64 * 128
    experts = 2 * 32 * 3 * 64 * 128
    assert collectives["one process"] == collectives["ep-as-dp, EP2"] == ("0", 0.0)
    assert collectives["shard-exp-on-fsdp, FSDP2"] == ("2", round(4 * matrices / MIB, 2))
    assert collectives["pure-fsdp, FSDP2"] == ("2", round(4 * (matrices + experts) / MIB, 2))
    assert (out / "muon_sharding.png").exists()
