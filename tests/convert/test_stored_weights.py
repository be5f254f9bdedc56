"""Checkpoints with quantized experts: read without expansion, written back bit for bit, refused before a copy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig, quantize_experts
from maxmoe.quantization import QuantizedWeight
from support import memory

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from convert.quantized_checkpoints import (
    BLOCK,
    FAMILIES,
    config_of,
    layer_for,
    read,
    tensors_of,
    unpacked,
    with_changes,
    written,
)
from maxmoe.convert.checkpoint import read_checkpoint, write_checkpoint
from support.messages import containing


def weights_by_others(kind: str) -> dict[str, Tensor]:
    """Expert weights (E, in, out) in float32, with the code of transformers where it has some."""
    tensors = {key.removeprefix(f"{BLOCK}.mlp.experts."): value for key, value in tensors_of(kind).items()}
    if kind == "mxfp4":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        def dequantized(name: str) -> Tensor:
            blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            weights: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            return weights

        return halves(dequantized("gate_up_proj"), dequantized("down_proj"))
    if kind == "nvfp4 stacked":
        ends = ("", "_weight_scale", "_weight_scale_2")
        of_all = ([tensors[f"{name}{end}"] for end in ends] for name in ("gate_up_proj", "down_proj"))
        return halves(*(nvfp4_by_definition(codes.mT, scales.mT, last) for codes, scales, last in of_all))
    weights: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for name, experts in weights.items():
        for expert in range(4):
            prefix = f"{expert}.{name}.weight"
            of_expert = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            experts.append(BY_OTHERS[kind.split()[0]](of_expert))
    return {name: torch.stack(experts).mT for name, experts in weights.items()}


def halves(both: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The experts of gpt-oss, whose gate and up alternate."""
    return {"gate_proj": both[..., 0::2], "up_proj": both[..., 1::2], "down_proj": down}


def nvfp4_by_definition(codes: Tensor, scales: Tensor, number: Tensor) -> Tensor:
    """(L, in, out), as ModelOpt's NVFP4QTensor.dequantize computes it."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    weights = values[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    return (weights.unflatten(-1, (-1, 16)) * (scales.float() * number.view(-1, 1, 1))[..., None]).flatten(-2).mT


def nvfp4_of_one(tensors: dict[str, Tensor]) -> Tensor:
    """ModelOpt multiplies by the number of a matrix; compressed-tensors divides by its own, and vLLM takes 1 / it."""
    codes, scales, number = tensors.values()
    return nvfp4_by_definition(codes[None], scales, 1 / number if "_global_scale" in tensors else number)[0].mT


def fp8_by_transformers(tensors: dict[str, Tensor]) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs: Any = Fp8Dequantize(None)
    result: Tensor = theirs._dequantize_one(tensors[""], tensors["_scale_inv"], output_dtype=torch.float32)
    return result


def int4_by_definition(tensors: dict[str, Tensor]) -> Tensor:
    """(q - zero) * scale, with the integers and zero points in [-8, 8), as compressed-tensors computes it."""
    rows, columns = tensors["_shape"].tolist()
    integers = unpacked(tensors["_packed"], columns)
    zeros = torch.zeros(rows, columns // 32, dtype=torch.int64)
    if "_zero_point" in tensors:
        zeros = unpacked(tensors["_zero_point"].mT, rows).mT
    spread = tensors["_scale"].float().repeat_interleave(32, 1)
    return (integers - zeros.repeat_interleave(32, 1)).float() * spread


BY_OTHERS = {"nvfp4": nvfp4_of_one, "fp8_block": fp8_by_transformers, "int4": int4_by_definition}


@pytest.mark.parametrize("kind", FAMILIES)
def test_published_layouts(kind: str, tmp_path: Path) -> None:
    """Read, written back bit for bit, or with ModelOpt's names, and read again into the same memory."""
    path, expected = written(tmp_path, kind), weights_by_others(kind)
    layer = read(path, kind)
    for name, value in expected.items():
        got = getattr(layer.experts, name)
        assert isinstance(got, QuantizedWeight) and not got.is_meta and not got.codes.requires_grad
        assert got.format == kind.split()[0] and got.is_transposed and got.dtype == torch.float32
        assert torch.equal(got.dequantize(), value), name
    assert layer(torch.randn(9, 256)).hidden_states.isfinite().all()
    write_checkpoint(tmp_path / "ours", {BLOCK: layer}, FAMILIES[kind])
    assert (tmp_path / "ours").read_bytes() == path.read_bytes() or kind == "nvfp4 packed"
    read(tmp_path / "ours", kind, again := layer_for(kind))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in layer.state_dict().items())
    before = layer.experts.up_proj
    for each in layer.experts.children():
        each.codes.zero_()
    (tmp_path / "ours").unlink()
    read(path, kind, layer)
    assert layer.experts.up_proj is before
    assert all(torch.equal(getattr(layer.experts, name).dequantize(), value) for name, value in expected.items())


def test_scales_of_activations_and_a_number_of_all_experts_in_nvfp4(tmp_path: Path) -> None:
    """Both are in checkpoints of ModelOpt and compressed-tensors; results do not depend on the first."""
    for kind, key, number, name in (
        ("nvfp4", "experts.1.up_proj.weight", "_scale_2", "experts.1.up_proj.input_scale"),
        ("nvfp4 packed", "experts.1.up_proj.weight", "_global_scale", "experts.1.up_proj.input_global_scale"),
        ("nvfp4 stacked", "experts.down_proj", "_weight_scale_2", "experts.down_proj_input_scale"),
    ):
        changes = {f"{key}{number}": torch.full((1,), 0.25), f"{BLOCK}.mlp.{name}": torch.ones(())}
        experts: Any = read(written(tmp_path, kind, **changes), kind).experts
        weight = experts.down_proj if "stacked" in kind else experts.up_proj[1]
        assert weight.row_scales.unique().tolist() == [4.0 if "packed" in kind else 0.25]


def test_rows_with_several_scales_are_no_checkpoint_in_nvfp4(tmp_path: Path) -> None:
    """As of gate and up beside each other, which are quantized apart."""
    layer = MoE(config_of("nvfp4 stacked")).requires_grad_(False)
    quantize_experts(layer, "nvfp4")
    with pytest.raises(ValueError, match=r"nvfp4 have one scale for all rows of a matrix, got [\d.e-]+ to [\d.e-]+"):
        write_checkpoint(tmp_path / "ours", {BLOCK: layer}, "gpt_oss")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("format", "hidden_size", "intermediate_size"),
    [
        ("mxfp4", 96, 64),
        ("mxfp4", 100, 37),
        ("nvfp4", 100, 37),
        ("fp8_block", 130, 150),
        ("int4", 130, 150),
        ("int4", 100, 37),
    ],
)
def test_what_this_library_has_quantized(format: str, hidden_size: int, intermediate_size: int, tmp_path: Path) -> None:
    """Sizes that blocks do not divide are filled up with zeros."""
    config = replace(config_of(format), hidden_size=hidden_size, intermediate_size=intermediate_size)
    layer, again = (MoE(config).requires_grad_(False) for _ in range(2))
    quantize_experts(layer, format)
    quantize_experts(again, format)
    write_checkpoint(tmp_path / "ours", {BLOCK: layer}, FAMILIES[format])
    read_checkpoint(tmp_path / "ours", {BLOCK: again}, FAMILIES[format])
    for name, tensor in layer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tensors = load_file(tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


# The layout, the end of the name of a tensor, the tensor in its place (None for none), and words of the error.
WRONG: list[tuple[str, str, Tensor | None, list[str]]] = [
    ("fp8_block", "2.up_proj.weight_scale_inv", torch.full((1, 2), torch.nan), ["2.up_proj.weight", "got nan"]),
    ("fp8_block", "2.up_proj.weight_scale_inv", torch.ones(2, 2), ["2.up_proj.weight_scale_inv", "(1, 2)", "(2, 2)"]),
    (
        "fp8_block",
        "2.up_proj.weight_scale_inv",
        None,
        ["missing experts.2.up_proj.weight_scale_inv, not known nothing"],
    ),
    (
        "nvfp4",
        "2.up_proj.weight_scale",
        torch.full((128, 16), torch.nan).to(torch.float8_e4m3fn),
        ["got 127, NaN in E"],
    ),
    ("nvfp4", "2.up_proj.weight_scale", torch.ones(128, 16), ["2.up_proj.weight_scale must be of F8_E4M3, got F32"]),
    ("nvfp4", "2.up_proj.weight_scale_2", torch.tensor(torch.inf), ["2.up_proj.weight", "row_scales", "got inf"]),
    ("nvfp4", "2.up_proj.weight_scale_2", torch.ones(2), ["2.up_proj.weight_scale_2 must have shape ()", "(2,)"]),
    ("nvfp4", "2.up_proj.weight_scale_2", None, ["missing experts.2.up_proj.weight_scale_2, not known nothing"]),
    ("nvfp4 packed", "2.up_proj.weight_global_scale", torch.zeros(1), ["2.up_proj.weight", "row_scales", "got inf"]),
    ("nvfp4 stacked", "down_proj_weight_scale_2", torch.ones(3), ["(4,)", "(3,)"]),
    ("nvfp4 stacked", "down_proj", torch.zeros(4, 256, 64).byte(), ["down_proj must have shape (4, 64, 256)"]),
    ("mxfp4", "down_proj_scales", torch.full((4, 256, 4), 255).byte(), ["down_proj", "of expert 0", "got 255"]),
    ("mxfp4", "down_proj_scales", None, ["as mxfp4", "missing experts.down_proj_scales, not known nothing"]),
    ("mxfp4", "down_proj_blocks", torch.zeros(4, 256, 8, 8).byte(), ["(4, 256, 4, 16)", "(4, 256, 8, 8)"]),
    ("mxfp4", "down_proj_blocks", torch.zeros(4, 256, 4, 16).char(), ["experts.down_proj_blocks", "U8", "I8"]),
    ("int4", "1.up_proj.weight_scale", torch.ones(128, 7), ["1.up_proj.weight_scale", "(128, 8)", "(128, 7)"]),
    ("int4", "1.up_proj.weight_scale", torch.ones(128, 4).bfloat16(), ["(128, 8)", "(128, 4)"]),  # groups of 64
    ("int4", "3.down_proj.weight_shape", torch.tensor([128, 256]), ["[256, 128]", "[128, 256]"]),
    ("int4", f"{BLOCK}.mlp.experts.0.up_proj.weight_g_idx", torch.zeros(256).int(), ["not known experts.0.up_proj."]),
    ("int4 with zeros", "2.up_proj.weight_zero_point", None, ["missing experts.2.up_proj.weight_zero_point"]),
]


@pytest.mark.parametrize(("kind", "key", "tensor", "words"), WRONG)
def test_wrong_tensors(kind: str, key: str, tensor: Tensor | None, words: list[str], tmp_path: Path) -> None:
    """Nothing is read, not even the tensors of another, correct layer."""
    tensors, path = tensors_of(kind), tmp_path / "model.safetensors"
    save_file(tensors, path)
    right = read(path, kind)
    for each in right.experts.children():
        each.codes.zero_()
    first = {key.replace(BLOCK, "model.layers.2"): tensor.clone() for key, tensor in tensors.items()}
    save_file(with_changes(tensors, {key: tensor}) | first, path)
    layer = layer_for(kind)
    before = layer.router.weight.clone()
    with pytest.raises(ValueError, match=containing(*words, str(tmp_path))):
        read_checkpoint(path, {"model.layers.2": right, BLOCK: layer}, FAMILIES[kind])
    assert layer.experts.up_proj.is_meta and torch.equal(layer.router.weight, before)
    assert not right.experts.up_proj.codes.any()  # type: ignore[attr-defined]


BLOCK_SIZES: dict[str, dict[str, Any]] = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [96, 128]},
    "int4": {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 96}}}},
}


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_block_sizes_that_no_format_has(kind: str, tmp_path: Path) -> None:
    """Two scales of 192 weights may belong to 128 and 64 or to 96 and 96 weights, depending on the config."""
    written(tmp_path, kind)
    config = tmp_path / "config.json"
    text = json.dumps({"quantization_config": BLOCK_SIZES[kind]})
    config.write_text(text)
    with pytest.raises(ValueError, match=r"config.json: the block size of weights must be a power of two, got .*96"):
        read(tmp_path, kind)
    config.write_text("no JSON")
    with pytest.raises(ValueError, match=r"config.json must be a JSON file"):
        read(tmp_path, kind)
    for size in ("128", "-1", "null"):
        config.write_text(text.replace("96", size))
        read(tmp_path, kind)


def test_blocks_that_a_layout_would_cut_are_named(tmp_path: Path) -> None:
    layer = MoE(config_of("mxfp4")).requires_grad_(False)
    quantize_experts(layer, "fp8_block")
    with pytest.raises(ValueError, match=r"experts.gate_up_proj: a slice of rows with step 2, where a scale is of 128"):
        write_checkpoint(tmp_path / "ours", {BLOCK: layer}, "gpt_oss")
    assert not (tmp_path / "ours").exists()


def test_experts_of_another_format(tmp_path: Path) -> None:
    path = written(tmp_path, "int4")
    layer = MoE(config_of("int4")).requires_grad_(False)
    with pytest.raises(ValueError, match=r"missing experts.0.gate_proj.weight.*dequantised first.*quantize_experts"):
        read(path, "int4", layer)
    quantize_experts(layer, "fp8_block")
    words = r"quantized as fp8_block: missing experts.0.gate_proj.weight, .*known experts.0.down_proj.weight_packed"
    with pytest.raises(ValueError, match=words):
        read(path, "int4", layer)
    ordinary = MoE(config_of("int4"))
    write_checkpoint(tmp_path / "model.safetensors", {BLOCK: ordinary}, "kimi_k2")
    words = r"quantized as fp8_block: missing experts.0.gate_proj.weight_scale_inv.*, not known nothing"
    with pytest.raises(ValueError, match=words):
        read(path, "int4", layer)
    layer = MoE(config_of("int4")).requires_grad_(False)
    quantize_experts(layer, "nf4")
    for refused in (read_checkpoint, write_checkpoint):
        with pytest.raises(ValueError, match=r"as mxfp4, nvfp4, fp8_block, int4, as checkpoints are, got nf4"):
            refused(path, {BLOCK: layer}, "kimi_k2")


BIG = MoEConfig(hidden_size=1024, intermediate_size=512, num_experts=24, top_k=2)
EXPERT = 3 * 1024 * 512  # bytes in 8 bits


def test_memory(tmp_path: Path) -> None:
    """Memory for one expert beyond the layer, read and written; torch maps the file, which takes address space only."""
    layer = MoE(BIG).requires_grad_(False)
    quantize_experts(layer, "fp8_block")
    path = tmp_path / "ours"
    with memory.at_most(2 * EXPERT):
        write_checkpoint(path, {BLOCK: layer}, "qwen3_moe")
    assert path.stat().st_size > memory.SELF_CONTAINED
    for each in layer.experts.children():
        each.codes.zero_()
    with memory.at_most(path.stat().st_size + 2 * EXPERT):
        read_checkpoint(path, {BLOCK: layer}, "qwen3_moe")
    assert layer.experts.down_proj.codes.any()  # type: ignore[attr-defined]
