"""`examples/replay_routes.py`: routes and log-probabilities come from the sampler, and a run leaves a picture."""

import copy
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import replay_routes
from maxmoe import MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from replay_routes import WAYS, Run

TINY = ["--steps", "2", "--prompts", "2", "--group-size", "3", "--length", "6", "--threads", "1"]


def options(*arguments: str) -> Namespace:
    return replay_routes.parse_options([*TINY, *arguments])


def taken(is_rounded: bool) -> dict[str, Run]:
    """Both models after one step from the same parameters, with a sampler in bfloat16 or in float32."""
    torch.manual_seed(0)
    moe = MoEConfig(hidden_size=32, intermediate_size=16, num_experts=16, top_k=2)
    config = DecoderConfig(vocab_size=replay_routes.VOCABULARY, hidden_size=32, num_layers=3, num_heads=4, moe=moe)
    model, runs = Decoder(config), {}
    for way in WAYS:
        runs[way] = Run(way, copy.deepcopy(model), 1e-3)
        torch.manual_seed(1)
        prompts = torch.randint(replay_routes.VOCABULARY, (8, replay_routes.PROMPT)).repeat_interleave(3, 0)
        with patch.object(Decoder, "bfloat16", Decoder.bfloat16 if is_rounded else lambda model: model):
            runs[way].step(prompts, options())
    return runs


def test_the_difference_is_that_of_rounding() -> None:
    """Without rounding there is no difference, because tokens, log-probabilities and routes fit together."""
    assert all(run.differences[0] < 1e-6 for run in taken(is_rounded=False).values())
    runs = taken(is_rounded=True)
    replayed, anew = (runs[way] for way in ("replayed", "routed anew"))
    assert 1e-4 < replayed.differences[0] < anew.differences[0] and replayed.rewards == anew.rewards
    parameters = [dict(run.model.named_parameters()) for run in (replayed, anew)]
    assert not torch.equal(*(each["embedding.weight"] for each in parameters))


def test_a_run_leaves_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_routes.run(options("--out", str(tmp_path))) == 0
    assert (tmp_path / "replay_routes.png").exists()
    assert f"Picture: {tmp_path / 'replay_routes.png'}" in capsys.readouterr().out
