"""`examples/muon_sharding.py`: all shardings have the losses of one process."""

from pathlib import Path

import pytest

import muon_sharding
from support.pretrain_run import words


@pytest.mark.slow
def test_a_run_writes_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = words(tmp_path / "text"), tmp_path / "out"
    sizes = ["--ranks", "2", "--steps", "3", "--batch-size", "2", "--sequence-length", "8"]
    assert muon_sharding.run(muon_sharding.parse_options([*sizes, "--data", str(data), "--out", str(out)])) == 0
    table = (out / "muon_sharding.md").read_text()
    assert table in capsys.readouterr().out and (out / "muon_sharding.png").exists()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == 4
    for name, loss, apart, *_ in rows:
        assert loss == rows[0][1] and float(apart or 0) < 1e-12, name
