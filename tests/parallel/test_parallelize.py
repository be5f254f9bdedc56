"""Ranks against one process: outputs, statistics, gradients and trained parameters of decoders under all conditions.

Each row is there for the claim that it begins with. Other rows of the same claim, or of pairs of options, are slow.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from parallel.steps_on_ranks import Case, check_cases, each_topic, made
from parallel.trainings import counted, padded, replayed, scaled, step, stepped_between, two_steps, with_frozen_expert
from support.adapted_decoders import adapted, partly_trained, quantized, quantized_and_adapted, sharing_outer
from support.parallel_decoder import (
    BLOCK,
    CONFIG,
    MOE,
    VARIANTS,
    MeshRules,
    batch,
    decoder,
    layouts,
    loss,
    step_of_one_process,
)
from support.run_ranks import fake_rank, run_ranks

EXPERT = MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2})
REPLICATED = MeshRules("ep-tp", {"data": 2, "expert": 2})
CUT = MeshRules("cp-as-ep", {"context": 2, "expert": 2})
PARTS = MeshRules("default", {"fsdp": 2, "tensor": 2})
BOTH = MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2})
ATTENTION = MeshRules("fsdp-as-dp-for-attn", {"fsdp": 2, "expert": 2})
EVERY_PART, ODD, NOTHING, LATENT = VARIANTS.values()
DISPATCHES = ("ring_of_experts", "ragged_all_to_all", "least_loaded", "gather_weights")
RING, RAGGED, LEAST_LOADED, GATHER = ({"dispatch": dispatch} for dispatch in DISPATCHES)


def presets() -> Iterator[Case]:
    yield Case("latent experts in tensor-parallel parts", PARTS, made(decoder, LATENT), step)
    yield Case("experts that compute nothing are on every rank", EXPERT, made(decoder, NOTHING), step)
    yield Case("sizes that no axis divides; balance over the batch", CUT, made(decoder, ODD), step, options=GATHER)
    yield Case("two axes shard one dim of the experts", BOTH, made(decoder, EVERY_PART), step)
    yield Case("attention under rules of its own", ATTENTION, made(decoder, EVERY_PART), step)
    for number, layout in enumerate(layouts(4)):  # each preset with two variants, each variant with every second preset
        for name in list(VARIANTS)[number % 2 :: 2]:
            options = GATHER if VARIANTS[name] is ODD else {}
            yield Case(name, layout, made(decoder, VARIANTS[name]), step, options=options, slow=True)
    for layout in layouts(8):
        yield Case("three axes, or four ranks on one", layout, made(decoder, EVERY_PART), step, slow=True)


def axes_of_tokens() -> Iterator[Case]:
    """Tables that give one axis to the tokens and to parts of a computation, after all other rules and before."""
    tables: list[tuple[str, dict[str, int], dict[str, list[str]]]] = [
        ("default", {"tensor": 2}, {"activation_batch": ["data", "fsdp", "tensor"]}),
        ("default", {"tensor": 2}, {"activation_length": ["tensor"]}),
        ("ep-tp", {"expert": 2}, {"activation_batch": ["data", "expert"]}),
        ("ep-tp", {"expert": 2}, {"activation_length": ["expert"]}),
        ("default", {"context": 2}, {"q_heads": ["context"], "kv_heads": ["context"], "activation_heads": ["context"]}),
        # `embed_moe` gets the axis in the bias of down_proj, which has no dim `mlp_moe`.
        ("default", {"tensor": 2}, {"embed_moe": ["fsdp", "tensor"]}),
        # The shared expert gate has only the dim `embed`.
        ("default", {"fsdp_transpose": 2}, {"embed": ["fsdp_transpose"], "activation_mlp": ["fsdp_transpose"]}),
    ]
    for number, (preset, sizes, override) in enumerate(tables):
        rules = LogicalRules.load(preset).override(override.items())
        first = LogicalRules([*rules[-len(override) :], *rules[: -len(override)]])  # gets its axes before all others
        for config, is_first, slow in ((CONFIG, number % 2, False), (ODD, not number % 2, True)):
            claim = f"the tokens have precedence over other dims: {override} {'first' if is_first else 'last'}"
            table = first if is_first else rules
            yield Case(claim, MeshRules(preset, sizes), made(decoder, config), step, rules=table, slow=slow)


EMBED_SHARDED = LogicalRules.load("ep-tp").override([("activation_embed", ("expert",))])


def residual_stream() -> Iterator[Case]:
    # Three heads, and shared experts of width 9, are not divisible by two ranks.
    whole = replace(CONFIG, num_heads=3, num_key_value_heads=3, moe=replace(MOE, intermediate_size=9))
    gathered = replace(
        CONFIG, tie_embeddings=True, recompute=("blocks",), moe=replace(MOE, top_k=1, normalization="none")
    )
    configs = {
        "experts with biases, shared experts with a gate": CONFIG,
        "parts that every rank computes whole": whole,
        "recomputed, tied, outputs of experts gathered": gathered,
    }
    for name, config in configs.items():
        for sizes in ({"expert": 2}, {"data": 2, "expert": 2}):
            layout, slow = MeshRules("ep-tp", sizes), "data" in sizes
            claim = f"hidden states sharded between modules: {name}"
            yield Case(claim, layout, made(decoder, config), step, rules=EMBED_SHARDED, slow=slow)


def recomputation() -> Iterator[Case]:
    parts = {"recompute": ("attention", "dispatch", "experts", "feed_forward", "norms", "shared_experts")}
    no_shared: Any = {"recompute": tuple(set(parts["recompute"]) - {"shared_experts"})}
    scaled_input = replace(
        CONFIG, moe=replace(MOE, apply_weights_to="input", num_shared_experts=0, shared_expert_gate=False)
    )
    dense = replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.5))
    plain, in_turn = made(decoder, CONFIG), {"num_chunks": 2}
    yield Case("weights of inputs, recomputed", EXPERT, made(decoder, scaled_input), step, options=no_shared | RAGGED)
    yield Case("every part of a chunk, recomputed", CUT, plain, step, options=parts | RAGGED | in_turn)
    yield Case("a capacity, recomputed", EXPERT, made(decoder, dense), step, options=parts | RING)
    yield Case("recomputed on tensor-parallel ranks", PARTS, plain, step, options=parts, slow=True)


def batches() -> Iterator[Case]:
    but_router_and_embedding = made(partly_trained, r"^(?!.*(router|embedding))")
    block, over_batch = made(decoder, BLOCK), replace(BLOCK, moe=replace(MOE, load_balance_scope="batch"))
    with_capacity = replace(BLOCK, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    yield Case("padding and documents in sequences that are cut", CUT, block, padded)
    yield Case("padding and documents in whole sequences", EXPERT, made(decoder, over_batch), padded, options=RAGGED)
    yield Case("the router's choice is replayed", EXPERT, block, replayed, options=RAGGED)
    yield Case("replayed by ranks with the same tokens", REPLICATED, block, replayed)
    yield Case("accumulated gradients, none of frozen weights", BOTH, but_router_and_embedding, counted, options=RAGGED)
    yield Case("the capacity of whole sequences", EXPERT, made(decoder, with_capacity), step)
    for layout in layouts(2):
        slow = layout.rules not in ("pure-fsdp", "ep-as-dp")
        yield Case(
            "a recomputation that ends early is no interruption", layout, block, two_steps, tolerance=1e-9, slow=slow
        )
        yield Case(
            "what the backward does not need may change",
            layout,
            made(partly_trained, "embedding"),
            stepped_between,
            slow=slow,
        )
    for layout in layouts(4):
        for name, config in (("sequence", BLOCK), ("batch", over_batch)):
            yield Case(f"padding, balance over the {name}", layout, made(decoder, config), padded, slow=True)


def load() -> Iterator[Case]:
    """Statistics of a step with two micro-batches, which move biases and balance losses."""
    moved = replace(BLOCK, moe=replace(MOE, correction_bias_update_rate=0.25))
    over_step = replace(BLOCK, moe=replace(MOE, load_balance_scope="step"))
    on_experts = MeshRules("ep-as-dp", {"expert": 2})
    for options in (RING, RAGGED, GATHER):
        claim = f"counts of each micro-batch once, {options['dispatch']}"
        yield Case(claim, on_experts, made(decoder, moved), counted, options=options)
    yield Case("counts of ranks that gather", MeshRules("pure-fsdp", {"fsdp": 2}), made(decoder, moved), counted)
    yield Case("balance over a step", on_experts, made(decoder, over_step), counted)
    for layout in (CUT, REPLICATED, PARTS):
        yield Case("balance over a step", layout, made(decoder, over_step), counted, slow=layout is PARTS)
    for layout in (on_experts, MeshRules("pure-fsdp", {"fsdp": 2})):
        yield Case("the hook of the documentation freezes an expert", layout, made(decoder, BLOCK), with_frozen_expert)


def scales() -> Iterator[Case]:
    block, by_default = made(decoder, BLOCK), ("pure-fsdp", "ep-as-dp", "default")
    for layout in layouts(2):
        slow = layout.rules not in by_default or "context" in layout.sizes
        yield Case("an overflow on one rank skips the step on all", layout, block, scaled, slow=slow)
    for layout in (EXPERT, REPLICATED, PARTS):
        yield Case("the norm has each gradient once on two axes", layout, block, scaled, slow=layout is not EXPERT)


# Two blocks of "mxfp4" and "int4" in each dim of a matrix, so that tensor parallelism cuts between them.
WIDE = replace(BLOCK, hidden_size=64, moe=replace(MOE, hidden_size=64, intermediate_size=64))
RECOMPUTED = replace(WIDE, recompute=("experts", "dispatch"))
NOT_GATED = replace(WIDE, recompute=("blocks",), moe=replace(WIDE.moe, gated=False, expert_bias=False))
FORMATS = ("mxfp4", "int4", "nf4", "int8", "fp8_row", "fp8_block", "nvfp4")


def quantized_experts() -> Iterator[Case]:
    """One process has the dequantized weights."""
    for number, layout in enumerate([*layouts(2), *layouts(4)]):
        format, make = FORMATS[number % 7], quantized_and_adapted if number % 3 else quantized
        claim = f"{format} is cut into whole blocks, {make.__name__}"
        yield Case(claim, layout, made(make, format, WIDE), step, slow=number >= len(FORMATS))
    in_turn = {"num_chunks": 2}
    for format, config, options, layout in (
        ("int4", RECOMPUTED, RING, EXPERT),
        ("mxfp4", NOT_GATED, RAGGED, REPLICATED),
        ("nvfp4", RECOMPUTED, LEAST_LOADED, EXPERT),
        ("int4", RECOMPUTED, LEAST_LOADED, EXPERT),  # sends quantized experts
        ("fp8_row", WIDE, GATHER, REPLICATED),
    ):
        model = made(quantized_and_adapted, format, config)
        claim, slow = f"{format} with {options}", format == "nvfp4"
        yield Case(claim, layout, model, step, options=options | in_turn, slow=slow)


def adapters() -> Iterator[Case]:
    """Adapters of PEFT beside the experts: only the factors are trained."""
    names, in_turn = ("default", "second"), {"num_chunks": 2}
    not_gated = replace(BLOCK, moe=replace(MOE, gated=False))
    again = replace(BLOCK, recompute=("experts", "dispatch"))
    two = made(adapted, again, names)
    yield Case("factors of two adapters travel with chunks", EXPERT, two, step, options=RAGGED | in_turn)
    yield Case("factors are lent with their experts", EXPERT, two, step, options=LEAST_LOADED)
    yield Case("gathered factors", REPLICATED, made(adapted, not_gated, names), step, options=GATHER)
    yield Case("factors of tensor-parallel parts", PARTS, made(adapted, CONFIG), step)
    shared = made(sharing_outer, again)
    yield Case("the ranks of all experts sum the gradient of a shared factor", EXPERT, shared, step, options=RAGGED)
    yield Case("a shared factor of experts on two axes", BOTH, shared, step, options=LEAST_LOADED)
    yield Case("a shared factor of tensor-parallel parts", PARTS, made(sharing_outer, CONFIG), step)
    on_two = MeshRules("ep-as-dp", {"expert": 2})
    yield Case("AdamW trains the factors alone", on_two, made(adapted), two_steps, tolerance=1e-9)
    for layout in layouts(2):
        yield Case("factors", layout, made(adapted, CONFIG), step, slow=True)
        yield Case("shared factors", layout, made(sharing_outer, CONFIG), step, slow=True)


@pytest.mark.filterwarnings("ignore:no rule for the logical name", "ignore:.*of the parameters are whole on every rank")
@each_topic(
    presets=presets(),
    axes_of_tokens=axes_of_tokens(),
    residual_stream=residual_stream(),
    recomputation=recomputation(),
    batches=batches(),
    load=load(),
    scales=scales(),
    quantized_experts=quantized_experts(),
    adapters=adapters(),
)
def test_ranks_compute_what_one_process_does(cases: list[Case]) -> None:
    check_cases(cases)


@pytest.mark.parametrize("rules", ["default", "pure-fsdp", "ep-tp"])
def test_one_rank_computes_the_bits_of_one_process(rules: str) -> None:
    (expected, gradients), (tokens, targets) = step_of_one_process(CONFIG), batch()
    with fake_rank(0, 1):
        model = parallelize(decoder(), Mesh({"fsdp": 1, "expert": 1}), rules)
        output = model(tokens)
        loss(output, targets).backward()
        assert output.logits.equal(expected.logits) and output.aux_loss.equal(expected.aux_loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad.to_local().equal(gradients[name]), name


@pytest.mark.parametrize(
    ("layout", "dispatch"),
    [
        (MeshRules("ep-as-cp", {"fsdp": 2, "expert": 2}), "ragged_all_to_all"),
        pytest.param(BOTH, "ring_of_experts", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_rank_generates_what_one_process_generates(layout: MeshRules, dispatch: Any) -> None:
    """Also with rules that shard sequences in training: in generation each rank has whole sequences of any length."""

    def generate(model: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(torch.arange(3).unsqueeze(0), 4)

    def check() -> torch.Tensor:
        model = parallelize(decoder(), Mesh(layout.sizes), layout.rules, dispatch=dispatch)
        return generate(model.eval())

    expected = generate(decoder())
    assert all(torch.equal(generated, expected) for generated in run_ranks(check, 4))


def test_capacity_of_sequences_that_are_cut_is_refused() -> None:
    config = replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    message = "blocks.1.feed_forward needs whole sequences, sharded here over ('context',): choose rules"
    with fake_rank(0, 4):
        model = decoder(config)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            parallelize(model, Mesh({"fsdp": 2, "context": 2}), "default")
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
