"""Small random models of transformers, one for each family of `maxmoe.presets`."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TABLES = yaml.safe_load(Path(__file__).with_name("small_configs.yaml").read_text())
SIZES: dict[str, Any] = _TABLES["sizes"]
# By preset: the folder in transformers.models, the class without "Config", "ForCausalLM" ..., and sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {name: tuple(entry) for name, entry in _TABLES["models"].items()}
SAME_LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = _TABLES["same_layers"]  # further families
MULTIMODAL: dict[str, dict[str, Any]] = _TABLES["multimodal"]
PER_LAYER = {"layer_types", "mlp_layer_types", "layers_block_type", "swiglu_limits", "swiglu_limits_shared"}
TEXT_CONFIGS = {"gemma4", "inkling", "llama4", "mistral_large4", "muse_spark", "qwen3_5_moe", "step3p7"}
CONVERTED_ONLY = ("gemma4",)  # no module is their block
REPLACED_ONLY = ("jetmoe", "switch_transformers")  # their blocks compute more than a layer does
CONVERTED_MODELS = [name for name in MODELS if name not in REPLACED_ONLY]
# Models whose experts can have another implementation, and whose saved files have no unused matrix.
STANDARD_MODELS = [name for name in CONVERTED_MODELS if name not in ("longcat_flash", "dbrx")]


class WithoutFloat32(TorchFunctionMode):
    """Replaces float32 by float64 in the code of a family, so that its results are exact."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is Tensor.float:
            function = Tensor.double
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def config_class(preset: str) -> Any:
    """The class of the config of the language model."""
    folder, name, _ = (MODELS | SAME_LAYERS)[preset]
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    return getattr(module, f"{name}TextConfig" if preset in TEXT_CONFIGS else f"{name}Config")


def config_of(preset: str, **overrides: Any) -> Any:
    """The config of the language model."""
    sizes = (MODELS | SAME_LAYERS)[preset][2]
    options = SIZES | sizes | overrides
    for name in PER_LAYER & sizes.keys():
        options[name] = (sizes[name] * options["num_hidden_layers"])[: options["num_hidden_layers"]]
    options |= {name: sizes.get(name, {}) | value for name, value in overrides.items() if isinstance(value, dict)}
    renamed = options.pop("renamed", {})
    options = {theirs: options[name] for theirs, name in renamed.items()} | options
    for name in {*renamed.values(), *options.pop("without", ())} - renamed.keys():
        del options[name]
    return config_class(preset)(**options)


def import_models(*presets: str) -> list[ModuleType]:
    """Import the modules of the models. Called by a module of tests, so that not every rank imports them."""
    folders = [(MODELS | SAME_LAYERS)[preset][0] for preset in presets]
    return [importlib.import_module(f"transformers.models.{folder}.modeling_{folder}") for folder in folders]


def model_of(preset: str, **overrides: Any) -> nn.Module:
    """The whole language model, with random values in all parameters and buffers of its sparse blocks."""
    (module,), name = import_models(preset), (MODELS | SAME_LAYERS)[preset][1]
    config = config_of(preset, **overrides)
    config._experts_implementation = "eager"  # the default one refuses widths of 10
    if preset in MULTIMODAL:
        whole = getattr(module, f"{name}Config")(text_config=config, **MULTIMODAL[preset])
        whole._experts_implementation = "eager"
        model = getattr(module, f"{name}ForConditionalGeneration")(whole)
    else:
        kind = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
        model = getattr(module, f"{name}{kind}")(config)
    for block in blocks_of(model).values():
        for value in block.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, dtype=torch.float64) * 0.3)
            else:  # experts of each token id
                value.copy_(torch.rand(len(value), block.experts.num_experts).topk(value.shape[1]).indices)
        if preset == "zaya":  # so that tokens select different experts, and some the one that skips the layer
            for name, factor in (("fc1", 8), ("fc2", 4), ("out_proj", 2)):
                getattr(block.gate.router_mlp, name).weight.data.mul_(factor)
            block.gate.router_mlp.norm.weight.data.add_(1)
            block.gate.balancing_biases.mul_(0.1).sub_(1.8)[-1] = -1.0  # as from_pretrained sets it, whatever it reads
    return model


def with_config(block: Any, model: Any) -> Any:
    """Give a block the config of its model if none of its modules has one."""
    if not any(hasattr(module, "config") for module in block.modules()):
        block.config = model.config
    return block


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The sparse blocks of a model, by the name of the decoder block that contains them."""
    return {
        name if type(module).__name__ == "Gemma4TextDecoderLayer" else name.rpartition(".")[0]: module
        for name, module in model.named_modules()
        if type(module).__name__ == "JetMoeMoE"
        or (isinstance(getattr(module, "experts", None), nn.Module) and type(module).__name__ != "JetMoeAttention")
    }


class SparsePart(nn.Module):
    """The modules of a decoder layer of Gemma 4 that are its sparse block, called as the layer calls them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts
        self.pre_feedforward_layernorm_2 = layer.pre_feedforward_layernorm_2
        self.post_feedforward_layernorm_2 = layer.post_feedforward_layernorm_2

    def forward(self, x: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, experts = self.router(rows)
        out = self.experts(self.pre_feedforward_layernorm_2(rows), experts, weights)
        return self.post_feedforward_layernorm_2(out.reshape(x.shape))


def block_of(preset: str, layer: int = 0, **overrides: Any) -> nn.Module:
    model = model_of(preset, num_hidden_layers=layer + 1, **overrides)
    block = with_config([*blocks_of(model).values()][layer], model)
    return SparsePart(block) if preset == "gemma4" else block
