"""Plans of models with quantized experts: bytes of codes and scales, for models on meta and against real ranks."""

from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig, quantize_experts, replay_routing
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import parallelize, parameter_shardings
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens
from maxmoe.planning import estimate, explain
from maxmoe.quantization import FORMATS
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding
from support.counted_collectives import CountedCollectives
from support.measured_step import PRESET_LAYOUTS, balanced_routing, by_kind_and_axis
from support.parallel_decoder import BATCH, LENGTH, MeshRules, batch, decoder, loss, token_spec
from support.run_ranks import run_ranks

GPT_OSS = MoEConfig(hidden_size=2880, intermediate_size=2880, num_experts=32, top_k=4)
PRESETS = ("default", "ep-as-dp", "shard-exp-on-fsdp", "pipeline-large-moe")
SIZES = {"vocab_size": 512, "hidden_size": 2880, "num_heads": 45, "head_dim": 64}


def quantized(format: str) -> Any:
    """Frozen quantized experts, and trained parameters before them, so that gradients pass through all modules."""
    model = decoder()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in path)
    quantize_experts(model, format)
    return model


def step(layout: MeshRules, format: str) -> tuple[dict[Any, list[int]], int]:
    """The collectives of a step, and the bytes of the parameters of a rank."""
    mesh = Mesh(layout.sizes)
    model = parallelize(quantized(format), mesh, layout.rules, dispatch="ring_of_experts")
    part = NamedSharding(mesh, token_spec(mesh, LogicalRules.load(layout.rules))).slices((BATCH, LENGTH))
    tokens, targets = (whole[part].clone() for whole in batch())
    with replay_routing(model, balanced_routing(model, tokens.shape)), CountedCollectives(mesh) as counted:
        loss(model(tokens), targets).backward()
    return dict(counted.counts), sum(parameter.to_local().nbytes for parameter in model.parameters())


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_a_step_is_what_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four presets, with another format each; in one group of ranks."""
    layouts = [layout for layout in PRESET_LAYOUTS if layout.rules in PRESETS]
    cases = list(zip(layouts, FORMATS, strict=False))
    monkeypatch.setattr(ShardedTokens, "_all_reduce", lambda tokens, summand, axes: summand)
    for measured in run_ranks(lambda: [step(*case) for case in cases], 4):
        for (layout, format), (collectives, num_bytes) in zip(cases, measured, strict=True):
            mesh, sizes = Mesh.planned(layout.sizes), {"batch_size": BATCH, "sequence_length": LENGTH}
            planned = estimate(quantized(format), mesh, layout.rules, dispatch="ring_of_experts", **sizes)
            expected = by_kind_and_axis(*planned.traffic)
            assert collectives == expected, (layout, format)
            assert num_bytes == planned.memory["parameters"], (layout, format)


def on_meta(format: str | None) -> Decoder:
    """Two layers of gpt-oss-20b with a small vocabulary, without memory."""
    model = Decoder(DecoderConfig(**SIZES, num_layers=2, moe=GPT_OSS), device="meta", dtype=torch.bfloat16)
    model.requires_grad_(False)
    if format is not None:
        quantize_experts(model, format)
    return model


def test_before_there_is_a_model() -> None:
    """Experts of "mxfp4" take 17/64 of the bytes of bfloat16, in memory and in the all-gathers."""
    mesh, sizes = Mesh.planned({"fsdp": 4, "expert": 2}), {"batch_size": 8, "sequence_length": 64}
    plans = [estimate(on_meta(format), mesh, "ep-as-dp", **sizes) for format in (None, "mxfp4")]
    weights = 3 * 2 * 32 * 2880 * 2880
    saved = 2 * weights - weights * 17 // 32
    of_rank = [plan.memory["parameters"] for plan in plans]
    # The 90 scales of a row are not sharded over 4 ranks.
    assert of_rank[0] - of_rank[1] == saved // 8 - weights // 3 * 2 // 32 * 3 // 8
    gathered = [row.bytes for plan in plans for row in plan.traffic if row.purpose == "weights, forward"]
    assert gathered[0] - gathered[1] == (2 - 1 / 2) * weights / 2 * 3 / 4 - weights // 3 // 32 // 2 * 3 // 4
    assert plans[0].memory["activations"] == plans[1].memory["activations"]


def test_tables() -> None:
    mesh = Mesh.planned({"fsdp": 4, "expert": 2})
    model, ordinary = on_meta("mxfp4"), on_meta(None)
    names = [name for name, _ in model.named_parameters()]
    plan, before = explain(model, mesh, "ep-as-dp"), explain(ordinary, mesh, "ep-as-dp")
    assert plan.num_parameters == before.num_parameters
    found = {parameter.name.split(".experts.")[-1]: parameter for parameter in plan.parameters}
    codes, scales = found["down_proj.mxfp4_codes"], found["down_proj.scales"]
    assert codes.parameter.names == scales.parameter.names == ("exp", "embed_moe", "mlp_moe")
    assert codes.local_shape == (16, 720, 1440) and codes.local_bytes == 16 * 720 * 1440
    assert scales.local_shape == (16, 720, 90) and scales.local_bytes == 16 * 720 * 90
    assert found["gate_proj.mxfp4_codes"].local_shape == (16, 2880, 360)
    assert found["gate_proj.scales"].local_shape == (16, 2880, 90)
    assert "down_proj.mxfp4_codes x2" in str(plan) and "90 is not divisible by 4" in str(plan)
    assert [name for name, _ in model.named_parameters()] == names, "a plan changes nothing"
    assert list(parameter_shardings(model, mesh, LogicalRules.load("ep-as-dp"))) == [
        each.name for each in plan.parameters
    ]
    assert [name for name, _ in model.named_parameters()] == names


def test_stages_are_balanced_by_weights() -> None:
    """Stages are not balanced by bytes: they equal the stages before quantization."""
    config = DecoderConfig(**SIZES, num_layers=6, num_dense_layers=4, intermediate_size=11520, moe=GPT_OSS)
    model, mesh = Decoder(config, device="meta").requires_grad_(False), Mesh.planned({"stage": 2})
    before = explain(model, mesh, num_micro_batches=4).pipeline
    quantize_experts(model, "int4")
    after = explain(model, mesh, num_micro_batches=4).pipeline
    assert before is not None and after is not None
    for stage, other in zip(before.stages, after.stages, strict=True):
        assert (stage.parts, stage.num_parameters, stage.work) == (other.parts, other.num_parameters, other.work)
    assert isinstance(model.blocks[4].feed_forward, MoE)
