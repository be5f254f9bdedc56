"""`examples/strategies.py` and `examples/muon_sharding.py`: losses and gradients of all ways are of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

import muon_sharding
import strategies
from dispatching import training
from examples.pretrain_run import words


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a table in Markdown, by the cell in the first column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {name: cells for name, *cells in lines[2:]}


@pytest.fixture
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of some strategies; only these run."""
    some = strategies.strategies(request.param[0])[request.param[1]]
    monkeypatch.setattr(training, "strategies", lambda num_ranks: some)
    monkeypatch.setattr(strategies, "COMPARISON", replace(strategies.COMPARISON, strategies=lambda num_ranks: some))
    return [strategy.name for strategy in some]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        pytest.param(["--ranks", "2"], (2, slice(0, 5)), marks=pytest.mark.slow),
        pytest.param(["--ranks", "4", "--random-routing"], (4, slice(5, 8, 2)), marks=pytest.mark.slow),
        (["--ranks", "2", "--random-routing"], (2, slice(0, 2))),
    ],
    indirect=["chosen"],
    ids=["ep and fsdp", "random, on two axes", "random, ep"],
)
def test_all_strategies_have_the_losses_of_one_process(
    options: list[str], chosen: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = words(tmp_path / "text"), tmp_path / "out"
    sizes = ["--steps", "2", "--batch-size", "4", "--sequence-length", "8"]
    assert strategies.run(strategies.parse_options([*options, *sizes, "--data", str(data), "--out", str(out)])) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [*rows] == ["one process", *chosen] and rows == rows_of((out / "strategies.md").read_text())
    loss, perplexity, *_, sent = rows.pop("one process")
    assert 5 < float(loss) < 6 and float(sent) == 0
    for name, (same_loss, same_perplexity, loss_apart, gradients_apart, _, peak, sent) in rows.items():
        assert (same_loss, same_perplexity) == (loss, perplexity), name
        assert float(loss_apart) < 1e-12 and float(gradients_apart) < 1e-11, name
        assert float(peak) > 0 and float(sent) > 0, name
    assert (out / "strategies.png").exists()


@pytest.mark.slow
def test_all_shardings_of_muon_have_the_losses_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = words(tmp_path / "text"), tmp_path / "out"
    sizes = ["--ranks", "2", "--steps", "3", "--batch-size", "2", "--sequence-length", "8"]
    assert muon_sharding.run(muon_sharding.parse_options([*sizes, "--data", str(data), "--out", str(out)])) == 0
    table = (out / "muon_sharding.md").read_text()
    assert table in capsys.readouterr().out and (out / "muon_sharding.png").exists()
    (expected, *_), *others = rows_of(table).values()
    assert len(others) == 3
    for loss, apart, *_ in others:
        assert loss == expected and float(apart) < 1e-12
