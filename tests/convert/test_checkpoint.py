"""Checkpoints as transformers writes them, read and written; every wrong key is named."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convert.quantized_checkpoints import with_changes
from maxmoe import MoE, MoEConfig, presets
from support import memory, small_models
from support.messages import containing

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from maxmoe.convert.checkpoint import read_checkpoint, write_checkpoint

each_family = pytest.mark.parametrize("name", [*small_models.STANDARD_MODELS, *small_models.SAME_LAYERS, "dbrx"])


def family_of(name: str) -> str:
    model_type: str = small_models.config_of(name).model_type
    return model_type


def empty_layers(name: str) -> dict[str, MoE]:
    config = small_models.config_of(name)
    decoder = "model.language_model" if name in small_models.MULTIMODAL else "model"
    layers = "transformer.blocks" if name == "dbrx" else f"{decoder}.layers"
    return {f"{layers}.{number}": MoE(presets.from_transformers(config, number)) for number in range(2)}


def converted_layers(model: torch.nn.Module) -> dict[str, MoE]:
    blocks = small_models.blocks_of(model)
    return {path: MoE.from_transformers(small_models.with_config(block, model)) for path, block in blocks.items()}


def is_stacked(name: str, stacked: bool) -> bool:
    """Whether transformers writes the names in memory, as it does for a language model without its towers."""
    return stacked or name == "inkling"


def as_saved(name: str, layers: dict[str, MoE], *, stacked: bool = False) -> dict[str, MoE]:
    """The layers by their names in files: some files name the decoder differently, or omit its name."""
    ours, theirs = {
        "nemotron_h": ("model.", "backbone."),
        "mistral_large4": ("model.language_model.", ""),
        "step3p7": ("model.language_model.", "model."),
    }.get(name, ("", ""))
    return {block if stacked else block.replace(ours, theirs, 1): layer for block, layer in layers.items()}


def assert_same_layers(got: dict[str, MoE], expected: dict[str, MoE]) -> None:
    assert got.keys() == expected.keys()
    for block, layer in expected.items():
        for key, tensor in layer.state_dict().items():
            assert torch.equal(got[block].state_dict()[key], tensor), f"{block}.{key}"


def moe_tensors(folder: Path, name: str = "") -> dict[str, Tensor]:
    """All tensors of a checkpoint that belong to sparse blocks."""
    modules = "mlp|moe|block_sparse_moe|feed_forward|mixer|ffn|gate|experts|shared_experts|share_expert"
    modules += "|post_mlp_layernorm" * (name == "axk1")
    if name == "gemma4":  # beside a dense block
        modules = "router|experts|(pre|post)_feedforward_layernorm_2"
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    decoder = r"((model|backbone|transformer)\.)?(language_model\.)?(layers|blocks)\.\d"
    names = rf"{decoder}\.({modules})\..*"
    return {key: tensor for key, tensor in tensors.items() if re.fullmatch(names, key)}


@each_family
def test_checkpoint_of_transformers(name: str, tmp_path: Path) -> None:
    """Read files of transformers, and write the same: keys as published, or, in many files, as in memory."""
    model, read = small_models.model_of(name), {}
    for stacked, max_shard_size in ((False, "50GB"), (True, "8KB")):
        folder = tmp_path / max_shard_size
        model.save_pretrained(folder, save_original_format=not stacked, max_shard_size=max_shard_size)
        read[stacked] = layers = empty_layers(name)
        saved = as_saved(name, layers, stacked=stacked)
        read_checkpoint(folder, saved, family_of(name))
        write_checkpoint(tmp_path / "ours", saved, family_of(name), stacked=is_stacked(name, stacked))
        ours, theirs = load_file(tmp_path / "ours"), moe_tensors(folder, name)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    expected = converted_layers(model)
    for layers in read.values():
        assert_same_layers(layers, expected)


def test_published_names_of_inkling(tmp_path: Path) -> None:
    """The names that transformers converts for the whole model, whose towers need more libraries."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    layers = converted_layers(small_models.model_of("inkling"))
    write_checkpoint(tmp_path / "ours", layers, "inkling_text")
    again = empty_layers("inkling")
    read_checkpoint(tmp_path / "ours", again, "inkling_text")
    assert_same_layers(again, layers)

    tensors, state = load_file(tmp_path / "ours"), layers["model.layers.1"].state_dict()
    mapping = get_checkpoint_conversion_mapping("inkling_mm_model")
    for pattern, names in {
        "mlp.experts.w13_weight": ("experts.gate_proj", "experts.up_proj"),
        "shared_w13_weight": ("shared_experts.gate_proj", "shared_experts.up_proj"),
    }.items():
        (converter,) = [each for each in mapping if pattern in each.source_patterns]
        (key,) = [key for key in tensors if key.startswith("model.layers.1.") and key.endswith(pattern)]
        deinterleave = converter.operations[0]
        (fused,) = deinterleave.convert({pattern: tensors[key]}, [pattern], [pattern]).values()
        assert torch.equal(fused, torch.cat([state[name].mT for name in names], 1))


def test_copy_experts_have_no_matrices(tmp_path: Path) -> None:
    """transformers keeps and saves gate and up matrices of zero-computation experts, which are never read."""
    model = small_models.model_of("longcat_flash")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = [key for key in tensors if re.search(r"\.experts\.[6-9]\.", key)]
    assert unused and all(key.endswith(("gate_proj.weight", "up_proj.weight")) for key in unused)
    with pytest.raises(ValueError, match=r"experts\.6"):
        read_checkpoint(tmp_path, empty_layers("longcat_flash"), "longcat_flash")
    save_file({key: tensor for key, tensor in tensors.items() if key not in unused}, tmp_path / "model.safetensors")
    layers = empty_layers("longcat_flash")
    read_checkpoint(tmp_path, layers, "longcat_flash")
    assert_same_layers(layers, converted_layers(model))
    write_checkpoint(tmp_path / "ours", layers, "longcat_flash")
    ours, theirs = load_file(tmp_path / "ours"), moe_tensors(tmp_path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_dtypes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors are written in their dtypes, the correction bias wider than the rest, and read into the layer's dtype.

    The bytes equal those of the safetensors library, which writes the widest dtype first for the alignment.
    """
    layers = {block: layer.to(dtype) for block, layer in empty_layers(name).items()}
    write_checkpoint(tmp_path / "ours", layers, family_of(name))
    wide = {tensor.dtype for key, tensor in load_file(tmp_path / "ours").items() if "correction" in key}
    narrow = {tensor.dtype for key, tensor in load_file(tmp_path / "ours").items() if "correction" not in key}
    assert narrow == {dtype} and wide <= {torch.promote_types(dtype, torch.float32)}
    save_file(load_file(tmp_path / "ours"), tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    again = {block: layer.to(dtype) for block, layer in empty_layers(name).items()}
    read_checkpoint(tmp_path / "ours", again, family_of(name))
    assert_same_layers(again, layers)
    double = {block: layer.double() for block, layer in empty_layers(name).items()}
    read_checkpoint(tmp_path / "ours", double, family_of(name))
    assert_same_layers(double, {block: layer.double() for block, layer in layers.items()})


BIG = MoEConfig(hidden_size=512, intermediate_size=256, num_experts=48, top_k=2)
EXPERT = 3 * 512 * 256 * 4


@pytest.mark.parametrize("stacked", [False, True])
def test_memory(stacked: bool, tmp_path: Path) -> None:
    """Memory for one expert beyond the layers; torch maps the file, which takes address space only."""
    layers = {"model.layers.0": MoE(BIG)}
    path = tmp_path / "ours"
    with memory.at_most(EXPERT):
        write_checkpoint(path, layers, "mixtral", stacked=stacked)
    assert path.stat().st_size > 48 * EXPERT
    assert 48 * EXPERT * 2 / 3 > memory.SELF_CONTAINED  # gate and up
    again = {"model.layers.0": MoE(BIG)}
    with memory.at_most(path.stat().st_size + EXPERT):
        read_checkpoint(path, again, "mixtral")
    assert_same_layers(again, layers)


BLOCK = "model.layers.0"


def edited(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A checkpoint of one layer, with tensors taken out (None), put in or changed by the end of their key."""
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, {BLOCK: empty_layers(name)[BLOCK]}, family_of(name))
    save_file(with_changes(load_file(path), changes), path)
    return path


MIXTRAL, MLP = f"{BLOCK}.block_sparse_moe", f"{BLOCK}.mlp"
W1, FUSED = f"{MIXTRAL}.experts.3.w1.weight", f"{MLP}.experts.gate_up_proj"
NO_EXPERT = {f"{MIXTRAL}.experts.{expert}.w{i}.weight": None for expert in range(6) for i in (1, 2, 3)}
MXFP4 = {
    f"{FUSED}_blocks": torch.zeros(6, 20, 1, 8).byte(),
    f"{FUSED}_scales": torch.zeros(6, 20, 1).byte(),
    FUSED: None,
}
WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mixtral", {W1: None}, ["missing experts.3.w1.weight", "not known nothing", "block_sparse_moe:"]),
    ("mixtral", {W1.replace("3", "6"): torch.zeros(1)}, ["missing nothing", "not known experts.6.w1.weight"]),
    ("mixtral", {W1: torch.zeros(16, 10)}, ["experts.3.w1.weight", "(10, 16)", "(16, 10)"]),
    ("mixtral", {W1: torch.zeros(10, 16).byte()}, ["experts.3.w1.weight", "BF16", "U8", "dequantise"]),
    ("mixtral", NO_EXPERT, ["block_sparse_moe.experts.{expert}.w1.weight", "got block_sparse_moe.gate.weight"]),
    (
        "deepseek_v3",
        {f"{MLP}.experts.0.gate_proj.weight_scale_inv": torch.ones(1)},
        ["weight_scale_inv", "dequantised"],
    ),
    ("gpt_oss", MXFP4, ["missing experts.gate_up_proj,", "gate_up_proj_blocks", "dequantised"]),
]


@pytest.mark.parametrize(("name", "changes", "words"), WRONG)
def test_wrong_keys(name: str, changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path = edited(tmp_path, name, **changes)
    layer = empty_layers(name)[BLOCK]
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match=containing(*words, name, str(path))):
        read_checkpoint(path, {BLOCK: layer}, family_of(name))
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())


@pytest.mark.parametrize(
    ("written", "read", "block", "words"),
    [
        ("qwen3_moe", "mixtral", BLOCK, ("block_sparse_moe.experts.{expert}.w1", "names belong to", "qwen3_moe")),
        ("mixtral", "qwen3_moe", BLOCK, ("mlp.experts.{expert}.gate_proj.weight", "names belong to", "mixtral")),
        ("llama4", "gpt_oss", BLOCK, ("mlp.experts.gate_up_proj", "names belong to", "llama4_text")),
        ("mixtral", "mixtral", "layers.0", ("begin with layers.0.,", f"got {BLOCK}.block_sparse_moe.experts.0")),
        ("deepseek_v2", "deepseek_v3", BLOCK, ("missing gate.e_score_correction_bias",)),
        ("deepseek_v3", "deepseek_v2", BLOCK, ("not known gate.e_score_correction_bias",)),
    ],
)
def test_another_family(written: str, read: str, block: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = edited(tmp_path, written)
    with pytest.raises(ValueError, match=containing(*words)):
        read_checkpoint(path, {block: empty_layers(read)[BLOCK]}, family_of(read))


@pytest.mark.parametrize("function", [read_checkpoint, write_checkpoint])
def test_wrong_arguments(function: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"family (?=.*mixtral).*gpt_oss.*'bert'"):
        function(tmp_path / "ours", empty_layers("mixtral"), "bert")
    on_meta = {BLOCK: MoE(presets.mixtral(hidden_size=4, intermediate_size=4), device="meta")}
    with pytest.raises(ValueError, match=r"model.layers.0.*router.weight.*meta.*to_empty"):
        function(edited(tmp_path, "mixtral"), on_meta, "mixtral")


def test_layer_of_another_family(tmp_path: Path) -> None:
    layers = empty_layers("deepseek_v3")
    with pytest.raises(ValueError, match=r"parameters.*lacks nothing.*no use for router.score_correction_bias, shared"):
        write_checkpoint(tmp_path / "ours", layers, "qwen3_moe")
    assert not (tmp_path / "ours").exists()


# Files


def test_folders(tmp_path: Path) -> None:
    layers = empty_layers("mixtral")
    with pytest.raises(ValueError, match=r"safetensors.*without any"):
        read_checkpoint(tmp_path, layers, "mixtral")
    for name in ("a.safetensors", "b.safetensors"):
        write_checkpoint(tmp_path / name, layers, "mixtral")
    with pytest.raises(ValueError, match=r"experts.0.w1.weight must be in one file.*b.safetensors"):
        read_checkpoint(tmp_path, layers, "mixtral")


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


OTHER_FILES = {
    "empty": b"",
    "pickle": b"\x80\x02",
    "long header": b"\xff" * 64,
    "no JSON": header('{"a": nope'),
    "cut off": header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
    "offsets": header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}') + bytes(16),
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_the_file_that_is_no_safetensors_file_is_named(content: bytes, tmp_path: Path) -> None:
    layers = empty_layers("mixtral")
    write_checkpoint(tmp_path / "a.safetensors", layers, "mixtral")
    (tmp_path / "b.safetensors").write_bytes(content)
    for path in (tmp_path, tmp_path / "b.safetensors"):
        with pytest.raises(ValueError, match=rf"^{tmp_path}/b\.safetensors must be a safetensors file: "):
            read_checkpoint(path, layers, "mixtral")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer."""
    layers, fifo = empty_layers("mixtral"), tmp_path / "a.safetensors"
    os.mkfifo(fifo)
    for path, place in ((tmp_path, fifo), (fifo, fifo), (Path("/dev/zero"), "/dev/zero")):
        with pytest.raises(ValueError, match=f"^{place} must be a safetensors file$"):
            read_checkpoint(path, layers, "mixtral")
    with pytest.raises(FileNotFoundError, match="none"):
        read_checkpoint(tmp_path / "none", layers, "mixtral")
