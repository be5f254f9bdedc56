"""What modules declare, and what they must not."""

import pytest
from torch import nn

from maxmoe import MoE, MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn.declaration import Declaration, declaration_of

CONFIG = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, num_shared_experts=2, expert_bias=True)


def test_a_module_without_one_declares_nothing() -> None:
    assert declaration_of(nn.Linear(2, 2)) == Declaration()


def test_an_attribute_of_another_type_is_an_error() -> None:
    module = nn.Linear(2, 2)
    module.declaration = {"weight": ("mlp", "embed")}
    message = r"^Linear.declaration must be a maxmoe.parallel.Declaration, got <class 'dict'>$"
    with pytest.raises(TypeError, match=message):
        declaration_of(module)


def test_parts_of_a_dim_are_positive() -> None:
    with pytest.raises(ValueError, match=r"^tensor_parallel_dims must be positive, got 'mlp': 0$"):
        Declaration(tensor_parallel_dims={"mlp": 0})


def test_experts_are_tensor_parallel_and_the_layer_gathers_nothing() -> None:
    layer = MoE(CONFIG)
    assert declaration_of(layer.experts).tensor_parallel_dims == {"mlp_moe": 4}
    assert not declaration_of(layer).gather_unit and not declaration_of(layer).tensor_parallel_dims
    assert layer.shared_experts is not None
    assert declaration_of(layer.shared_experts).tensor_parallel_dims == {"mlp": 8}


def test_every_parameter_of_a_decoder_has_one_name_per_dim() -> None:
    model = Decoder(
        DecoderConfig(
            vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=8, num_dense_layers=1, moe=CONFIG
        )
    )
    named = {}
    for path, module in model.named_modules():
        for name, names in declaration_of(module).logical_names.items():
            named[f"{path}.{name}" if path else name] = names
    for path, parameter in model.named_parameters():
        assert len(named[path]) == parameter.dim(), path
