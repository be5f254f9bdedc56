"""Quantized experts on a mesh: each step equals one process's with the dequantized weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from maxmoe import quantize_experts
from maxmoe.adapters import packed_as_by_peft
from maxmoe.costs import estimate
from maxmoe.models import DecoderConfig
from maxmoe.ops import Projection, gmm
from maxmoe.parallel import Declaration, parallelize, reset_parameters
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.quantization import QuantizedStack, QuantizedWeight, dequantize_experts, quantize
from maxmoe.sharding import LogicalRules, Mesh
from support.moved_experts import moving_experts
from support.parallel_decoder import BLOCK, CONFIG, MOE, MeshRules, batch, decoder, layouts, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_ranks
from support.sampling import by_default

# Two blocks of "mxfp4" and "int4" in each dim of a matrix, so that tensor parallelism cuts between them.
WIDE = replace(BLOCK, hidden_size=64, moe=replace(MOE, hidden_size=64, intermediate_size=64))
FORMATS = ["mxfp4", "int4", "nf4", "int8", "fp8_row", "fp8_block"]
TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def quantized(format: str, config: DecoderConfig = WIDE) -> nn.Module:
    """A decoder with frozen quantized experts, the same at every call; everything else is trained."""
    model = decoder(config)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not path.endswith(tuple(TARGETS)))
    quantize_experts(model, format, group_size=32 if format == "int4" else None)
    generator = torch.Generator().manual_seed(2)
    for weight in model.modules():
        if isinstance(weight, QuantizedWeight) and format == "int4":
            zeros = torch.randint(16, weight.scales.shape, generator=generator, dtype=torch.uint8)
            weight.zeros = nn.Parameter(zeros, requires_grad=False)
    return model


def adapted(format: str, config: DecoderConfig = WIDE) -> Any:
    """Adapters beside quantized experts, and a trained embedding, so that the gradient passes through all modules."""
    model: Any = quantized(format, config)
    torch.manual_seed(3)
    options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options)).to(torch.float64)
    model.base_model.model.embedding.weight.requires_grad_(True)
    return model


Expected = tuple[Tensor, dict[str, Tensor]]


def of_one_process(format: str, config: DecoderConfig = WIDE, has_adapters: bool = True) -> Expected:
    """Output and gradients with the dequantized weights."""
    model = (adapted if has_adapters else quantized)(format, config)
    dequantize_experts(model)
    tokens, targets = batch()
    output = model(tokens)
    loss(output, targets).backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def check_step(
    expected: Expected,
    layout: MeshRules,
    format: str,
    dispatch: Dispatch = "auto",
    config: DecoderConfig = WIDE,
    num_chunks: int = 1,
    has_adapters: bool = True,
) -> None:
    logits, gradients = expected
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    model = (adapted if has_adapters else quantized)(format, config)
    model = parallelize(model, mesh, rules, dispatch=dispatch, num_chunks=num_chunks)
    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    output = model(tokens)
    assert_same(output.logits, part_by_definition(logits, spec, mesh), "logits")
    loss(output, targets).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == gradients.keys()
    for name, parameter in trained.items():
        assert isinstance(parameter.grad, DTensor)
        whole = parameter.grad.full_tensor()
        whole = packed_as_by_peft(name, whole) if "lora_" in name else whole
        assert_same(whole, gradients[name], name, scale=float(gradients[name].abs().max()))


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("world_size", by_default([2, 4], [2]))
def test_a_step_equals_that_of_one_process(world_size: int) -> None:
    """Every preset, with another format each; with adapters beside the experts, and without."""
    cases = [
        (layout, FORMATS[number % len(FORMATS)], number % 3 > 0) for number, layout in enumerate(layouts(world_size))
    ]
    expected = [of_one_process(format, has_adapters=has_adapters) for _, format, has_adapters in cases]

    def check() -> None:
        for of_one, (layout, format, has_adapters) in zip(expected, cases, strict=True):
            check_step(of_one, layout, format, has_adapters=has_adapters)

    run_ranks(check, world_size)


RECOMPUTED = replace(WIDE, recompute=("experts", "dispatch"))
NOT_GATED = replace(WIDE, recompute=("blocks",), moe=replace(WIDE.moe, gated=False, expert_bias=False))


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("turn", by_default(range(2), [0]))
def test_strategies(turn: int) -> None:
    """Strategies that send tokens or weights or gather weights, chunks, recomputation; with zero points."""
    layouts = MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}), MeshRules("ep-tp", {"data": 2, "expert": 2})
    cases: list[tuple[Dispatch, str, DecoderConfig]] = [
        ("ring_of_experts", "int4", RECOMPUTED),
        ("ragged_all_to_all", "mxfp4", NOT_GATED),
        ("least_loaded", "int4", RECOMPUTED),
        ("gather_weights", "fp8_row", WIDE),
    ]
    expected = [of_one_process(format, config) for _, format, config in cases]

    def check() -> None:
        for number, (dispatch, format, config) in enumerate(cases):
            layout = layouts[(number + turn) % 2]  # experts move on the first one alone, in the first turn
            with moving_experts(dispatch == "least_loaded" and layout.rules == "ep-as-dp"):
                check_step(expected[number], layout, format, dispatch, config, num_chunks=2)

    run_ranks(check, 4)


class Stacks(nn.Module):
    """Experts of another library, [out, in], whose names are declared outside of them."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(4, 96, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.up_proj = QuantizedWeight(quantize(weights.mT, "int4", group_size=32).mT)
        self.bias = nn.Parameter(torch.ones(4, 96, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return gmm(x, Projection(self.up_proj.mT, self.bias), torch.full((4,), len(x) // 4))


def model_of_stacks() -> nn.Module:
    """Two modules that share a stack."""
    model = nn.Sequential(Stacks(), nn.Linear(96, 64).double(), Stacks())
    model[2].up_proj = model[0].up_proj
    model.declaration = Declaration(  # type: ignore[assignment]
        logical_names={f"{layer}.up_proj": ("exp", "mlp_moe", "embed_moe") for layer in (0, 2)}
    )
    return model


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole on every rank along fsdp")
def test_modules_of_others() -> None:
    torch.manual_seed(0)
    model, x = model_of_stacks(), torch.randn(8, 64, dtype=torch.float64)
    model(x).square().sum().backward()

    def check() -> None:
        ours = model_of_stacks()
        ours[1].load_state_dict(model[1].state_dict())
        parallelize(ours, Mesh({"fsdp": 2, "expert": 2}), "ep-as-dp", allow_unused=True)
        assert ours[0].up_proj is ours[2].up_proj
        assert ours[0].up_proj.codes.to_local().shape == (2, 96, 16)
        assert ours[2].up_proj.scales.to_local().shape == (2, 96, 1)
        ours(x).square().sum().div(4).backward()  # all ranks have the same rows, and the gradients are summed
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    run_ranks(check, 4)


# Shardings and changes that codes and scales do not support


def test_the_module_after_parallelize() -> None:
    model = quantized("int8").requires_grad_(False)
    whole = {name: weight for name, weight in model.named_modules() if isinstance(weight, QuantizedWeight)}
    shapes = {name: weight.shape for name, weight in whole.items()}
    optimizer = torch.optim.AdamW(whole.popitem()[1].parameters(), lr=0.1)
    with fake_rank(1, 2):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")
        experts = model.blocks[0].feed_forward.experts
        for name, shape in shapes.items():
            attribute = getattr(experts, name.rpartition(".")[2])
            assert isinstance(attribute, QuantizedStack) and attribute.shape == shape
            for part, dtype in (("int8_codes", torch.uint8), ("scales", torch.float32)):
                parameter = model.get_parameter(f"{name}.{part}")
                assert isinstance(parameter, DTensor) and parameter.dtype == dtype
                assert not parameter.requires_grad
        assert "QuantizedWeight((8, 64, 64), format='int8', block=1 x 64, scales=torch.float32, " in repr(experts)
        scales = experts.up_proj.scales.to_local().clone()
        model.to(torch.bfloat16)
        assert experts.up_proj.dtype == experts.up_bias.dtype == torch.bfloat16
        assert torch.equal(experts.up_proj.scales.to_local(), scales) and scales.dtype == torch.float32
        with pytest.raises(ValueError, match="experts quantized as int8 are not initialized"):
            reset_parameters(experts)
        with pytest.raises(
            RuntimeError, match=r"AdamW must be made after parallelize: it holds the replaced .*int8_codes"
        ):
            optimizer.step()
        with pytest.raises(ValueError, match=r"experts.gate_proj must not be quantized yet, got int8"):
            quantize_experts(model, "int8")
        with pytest.raises(ValueError, match=r"^dequantize_experts needs whole tensors, got .*_proj as a DTensor"):
            dequantize_experts(model)


def test_parallelized_experts_are_not_quantized() -> None:
    model = decoder(WIDE).requires_grad_(False)
    with fake_rank(0, 2):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")
        with pytest.raises(ValueError, match=r"quantize_experts needs whole tensors, got .* as a DTensor on"):
            quantize_experts(model, "mxfp4")


@pytest.mark.parametrize(
    ("format", "width", "message"),
    [
        ("mxfp4", 96, r"down_proj is quantized as mxfp4, in blocks of 32 columns: .* of its 96 columns, got 48"),
        ("int4", 160, r"down_proj is quantized as int4, in blocks of 128 columns: .* of its 160 columns, got 80"),
        ("fp8_block", 192, r"gate_proj is quantized as fp8_block, in blocks of 128 rows: .* of its 192 rows, got 96"),
    ],
)
def test_blocks_are_not_cut(format: str, width: int, message: str) -> None:
    """Nor a shorter last block, even if the number of blocks is divisible by the ranks; the model is unchanged."""
    model = decoder(replace(CONFIG, moe=replace(MOE, intermediate_size=width))).requires_grad_(False)
    quantize_experts(model, format)
    before = dict(model.named_parameters())
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(model, Mesh({"tensor": 2}), "default")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    with pytest.raises(ValueError, match=message):
        estimate(model, Mesh.planned({"tensor": 2}), "default", batch_size=2, sequence_length=8)


def test_ranks_agree_on_the_format() -> None:
    """Formats with codes and scales of the same shapes."""

    def check() -> None:
        with pytest.raises(ValueError, match=r"the ranks must agree on .*fp8_row"):
            parallelize(quantized("int8" if dist.get_rank() else "fp8_row"), Mesh({"expert": 2}), "ep-as-dp")

    run_ranks(check, 2)


# Saving


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def test_saved_and_loaded_on_another_mesh(tmp_path: Path) -> None:
    """The loaded state, gathered and loaded in one process, has the quantized bytes."""

    def save() -> dict[str, Tensor]:
        model = parallelize(quantized("int4"), Mesh({"fsdp": 2, "expert": 2}), "ep-as-dp")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
        return whole_state(model)

    def load() -> dict[str, Tensor]:
        model = parallelize(quantized("int4"), Mesh({"tensor": 2}), "default")
        for parameter in model.parameters():
            parameter.data.to_local().zero_()
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state["model"])
        return whole_state(model)

    saved, loaded = run_ranks(save, 4)[0], run_ranks(load, 2)[0]
    expected, model = quantized("int4"), quantized("int4")
    for parameter in model.parameters():
        parameter.data.zero_()
    assert saved.keys() == loaded.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    model.load_state_dict(loaded)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
