"""State dicts and folders of models with replaced blocks are those of transformers, which reads them, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from maxmoe.integrations.transformers import replace_moe_blocks
from support.replaced_models import IDS, PRESETS, assert_equal, replaced, small_model

# F = D, where a transposed matrix has the same shape.
SQUARE: dict[str, Any] = dict.fromkeys(
    [
        "intermediate_size",
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "share_expert_dim",
        "d_ff",
    ],
    16,
) | {"ffn_config": {"ffn_hidden_size": 16}}


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_folders_are_those_of_transformers(preset: str, tmp_path: Path) -> None:
    """The code of the family reads them. Every second family is saved with F = D, in several files."""
    is_square = PRESETS.index(preset) % 2 == 1
    sizes, options = (SQUARE, {"max_shard_size": "10KB"}) if is_square else ({}, {})
    eager, ours = small_model(preset, **sizes).bfloat16(), replaced(preset, **sizes).bfloat16()
    assert list(ours.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in eager.named_parameters()]
    for parameter in eager.parameters():
        parameter.data.add_(1.0)
    ours.load_state_dict(eager.state_dict())
    assert_equal(ours.state_dict(), eager.state_dict())

    ours.save_pretrained(tmp_path, **options)
    config = AutoConfig.from_pretrained(tmp_path)
    model, info = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(map(len, info.values())), info
    assert_equal(model.state_dict(), ours.state_dict())
    assert all("maxmoe" not in file.read_text() for file in tmp_path.glob("*.json"))


def test_published_names_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    model = replaced("mixtral")
    model.save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    replaced("mixtral").load_state_dict(tensors)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}: must be \(16, 10\), got \(10, 16\)"):
        model.load_state_dict(tensors | {name: tensors[name].T})
    del tensors[name]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.layers.1.mlp.experts.down_proj"'):
        model.load_state_dict(tensors)


def test_a_folder_is_loaded_and_replaced(tmp_path: Path) -> None:
    replaced("qwen2_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert len(replace_moe_blocks(model)) == 2
    torch.testing.assert_close(model(IDS).logits, replaced("qwen2_moe").eval()(IDS).logits)
    model.save_pretrained(tmp_path / "again")
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again")))
