"""torch.export: a program that another process loads gives the same numbers."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from maxmoe import MoEOutput, MoEStats
from maxmoe.models import Decoder, DecoderOutput
from support.call_in_fork import call_in_fork
from support.moe_layers import DEEPSEEK, make, tokens
from support.parallel_decoder import CONFIG


def test_of_the_layer_for_any_number_of_tokens(tmp_path: Path) -> None:
    layer = make(**DEEPSEEK)
    inputs = [tokens(layer, 2, 5), tokens(layer, 3, 9)]
    program = torch.export.export(layer, (inputs[0],), dynamic_shapes={"x": {0: Dim("batch"), 1: Dim("length")}})
    torch.export.save(program, tmp_path / "layer.pt2")

    def load() -> list[list[Tensor]]:
        loaded = torch.export.load(tmp_path / "layer.pt2").module()
        results = [loaded(x) for x in inputs]
        assert all(type(result) is MoEOutput and type(result.stats) is MoEStats for result in results)
        return [[tensor.detach() for tensor in (*result[:2], *result.stats)] for result in results]

    for x, got in zip(inputs, call_in_fork(load, seconds=120), strict=True):
        output = layer(x)
        for one, other in zip(got, [*output[:2], *output.stats], strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-13, atol=1e-13)


def test_of_a_model(tmp_path: Path) -> None:
    model, x = Decoder(CONFIG), torch.randint(CONFIG.vocab_size, (2, 7))
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    output, expected = torch.export.load(tmp_path / "model.pt2").module()(x), model(x)
    assert isinstance(output, DecoderOutput)
    torch.testing.assert_close(output.logits, expected.logits)
    assert torch.equal(output.tokens_per_expert, expected.tokens_per_expert)


NO_ONNX = r"maxmoe::\w+ cannot be exported to ONNX, which has no operators for routing and grouped matrix products"


def test_an_export_to_onnx_says_why_it_fails(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(torch.onnx.OnnxExporterError) as raised:
        torch.onnx.export(Decoder(CONFIG).eval(), (torch.zeros(2, 7).long(),), tmp_path / "model.onnx")
    assert re.search(NO_ONNX, str(raised.value))


def test_no_operator_has_a_fake_in_an_export_to_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match=NO_ONNX):
        torch.export.export(Decoder(CONFIG), (torch.zeros(2, 7).long(),))
