"""Functions that need whole weights refuse sharded layers before anything is written or moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from maxmoe import MoE, presets, quantize_experts
from maxmoe.parallel import parallelize
from maxmoe.sharding import Mesh
from support.run_ranks import run_cases, run_ranks
from support.small_models import block_of

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from maxmoe.convert.blocks import config_of_block
from maxmoe.convert.checkpoint import read_checkpoint, write_checkpoint

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "experts": lambda layer: parallelize(layer, Mesh({"expert": 2}), "ep-as-dp"),
    "replicated": lambda layer: parallelize(layer, Mesh({"data": 2}), "default"),
    "fully_shard": lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (2,))),
}


def refused(function: str, call: Callable[[], object], *modules: nn.Module) -> None:
    """Check the error, and that the modules are unchanged."""
    before = [{name: local(tensor).clone() for name, tensor in module.state_dict().items()} for module in modules]
    with pytest.raises(ValueError, match=rf"^{function} needs whole tensors, got \S+ as a DTensor on .*parallelize"):
        call()
    for module, tensors in zip(modules, before, strict=True):
        for name, tensor in module.state_dict().items():
            assert torch.equal(local(tensor), tensors[name]), name


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_sharded_layers_are_refused(tmp_path: Path) -> None:
    def check(way: str) -> None:
        folder = tmp_path / way / str(torch.distributed.get_rank())
        folder.mkdir(parents=True)
        block: Any = block_of("mixtral")
        config = config_of_block(block)
        path, layers = folder / "file", {"model.layers.0": MoE(config)}
        write_checkpoint(path, layers, "mixtral")
        content = path.read_bytes()
        layer: Any = WAYS[way](MoE(config))
        sharded = {**layers, "model.layers.1": layer}
        refused("write_checkpoint", lambda: write_checkpoint(path, sharded, "mixtral"))
        refused("write_checkpoint", lambda: write_checkpoint(path, sharded, "mixtral", stacked=True))
        assert path.read_bytes() == content and [*folder.iterdir()] == [path]
        refused("read_checkpoint", lambda: read_checkpoint(path, sharded, "mixtral"), *sharded.values())
        refused("to_transformers", lambda: layer.to_transformers(block), layer, block)
        refused("quantize_experts", lambda: quantize_experts(layer, "mxfp4"), layer)
        whole = MoE(config)
        WAYS["fully_shard"](block)
        refused("to_transformers", lambda: whole.to_transformers(block), whole, block)
        refused("from_transformers", lambda: MoE.from_transformers(block), block)

    run_cases(check, 2, [(way,) for way in WAYS])


def test_quantized_layers_are_refused_and_written_by_one_process(tmp_path: Path) -> None:
    """The function that the message names writes the file of a layer that was never sharded."""

    def quantized() -> MoE:
        layer = MoE(presets.gpt_oss(hidden_size=64, intermediate_size=64, num_experts=4)).requires_grad_(False)
        quantize_experts(layer, "mxfp4")
        return layer

    def check() -> None:
        torch.manual_seed(0)
        layer, folder = quantized(), tmp_path / str(torch.distributed.get_rank())
        folder.mkdir()
        write_checkpoint(folder / "file", {"model.layers.0": layer}, "gpt_oss")
        parallelize(layer, Mesh({"expert": 2}), "ep-as-dp")
        call = {"model.layers.0": layer}
        refused("write_checkpoint", lambda: write_checkpoint(folder / "sharded", call, "gpt_oss"))
        refused("read_checkpoint", lambda: read_checkpoint(folder / "file", call, "gpt_oss"), layer)
        whole = quantized()
        whole.load_state_dict(get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True)))
        write_checkpoint(folder / "whole", {"model.layers.0": whole}, "gpt_oss")
        assert (folder / "whole").read_bytes() == (folder / "file").read_bytes()

    run_ranks(check, 2)
