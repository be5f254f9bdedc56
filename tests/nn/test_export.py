"""torch.export: a program that another process loads gives the same numbers."""

from pathlib import Path

import pytest
import torch
from torch.export import Dim

from maxmoe.models import Decoder, DecoderOutput
from support import programs
from support.moe_layers import COMPUTE, DEEPSEEK, make, tokens
from support.parallel_decoder import CONFIG
from support.slow_cases import by_default

LOAD = """
import sys
import torch
import maxmoe.nn

for folder in sys.argv[1:]:
    layer = torch.export.load(f"{folder}/layer.pt2").module()
    results = [layer(x) for x in torch.load(f"{folder}/inputs.pt")]
    assert all(type(result) is maxmoe.MoEOutput and type(result.stats) is maxmoe.MoEStats for result in results)
    torch.save([[*result[:2], *result.stats] for result in results], f"{folder}/outputs.pt")
"""


@pytest.mark.parametrize("computes", by_default([("sparse",), ("capacity", "dense", "wide_capacity")], [("sparse",)]))
def test_of_the_layer_for_any_number_of_tokens(tmp_path: Path, computes: tuple[str, ...]) -> None:
    layers = {tmp_path / compute: make(**DEEPSEEK, **COMPUTE[compute]) for compute in computes}
    for folder, layer in layers.items():
        folder.mkdir()
        inputs = [tokens(layer, 2, 5), tokens(layer, 3, 9)]
        shapes = {"x": {0: Dim("batch"), 1: Dim("length")}}
        torch.export.save(torch.export.export(layer, (inputs[0],), dynamic_shapes=shapes), folder / "layer.pt2")
        torch.save(inputs, folder / "inputs.pt")
    programs.printed(programs.python(LOAD, *map(str, layers)))
    for folder, layer in layers.items():
        for x, got in zip(torch.load(folder / "inputs.pt"), torch.load(folder / "outputs.pt"), strict=True):
            output = layer(x)
            for one, other in zip(got, [*output[:2], *output.stats], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore:Converting a tensor")
def test_traced_by_jit() -> None:
    layer = make()
    x = tokens(layer, 2, 5)
    traced = torch.jit.trace(layer, x)
    assert torch.equal(traced(2 * x)[0], layer(2 * x).hidden_states)


def test_of_a_model(tmp_path: Path) -> None:
    model, x = Decoder(CONFIG), torch.randint(CONFIG.vocab_size, (2, 7))
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    output, expected = torch.export.load(tmp_path / "model.pt2").module()(x), model(x)
    assert isinstance(output, DecoderOutput)
    torch.testing.assert_close(output.logits, expected.logits)
    assert torch.equal(output.tokens_per_expert, expected.tokens_per_expert)


NO_ONNX = r"maxmoe::\w+ cannot be exported to ONNX, which has no operators for routing and grouped matrix products"


def test_an_export_to_onnx_says_why_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match=NO_ONNX):
        torch.export.export(Decoder(CONFIG), (torch.zeros(2, 7).long(),))
