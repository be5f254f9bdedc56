"""Padding in models with replaced blocks: every form of attention mask, caches, recomputations, errors and threads."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask

from maxmoe import StatsAccumulator
from maxmoe.integrations.transformers import TransformersMoE
from maxmoe.integrations.transformers.token_masks import token_mask
from support.replaced_models import (
    IDS,
    assert_same,
    enable_checkpointing,
    labels_of,
    padding,
    replaced,
    small_model,
    step,
)
from support.threads import in_threads

BOTH_SIDES = torch.cat([padding(1, "left"), padding(3, "right")[1:]])


def seen_masks(model: nn.Module) -> list[Any]:
    """The masks with which the routers of all layers select experts."""
    seen: list[Any] = []

    def recorded(route: Any, inputs: Any) -> Any:
        seen.append(None if inputs.token_mask is None else inputs.token_mask.view(*inputs.leading_dims))
        return route(inputs)

    for block in model.modules():
        if isinstance(block, TransformersMoE):
            block.route = partial(recorded, block.route)
    return seen


# Forms of masks


def four_dims(model: Any, mask: Tensor, implementation: str) -> Tensor:
    model.config._attn_implementation = implementation
    embeds = model.model.embed_tokens(IDS)
    return create_causal_mask(config=model.config, inputs_embeds=embeds, attention_mask=mask, cache=None)


FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "int64": lambda model, mask: mask,
    "bool": lambda model, mask: mask.bool(),
    "float": lambda model, mask: mask.float(),
    "added": lambda model, mask: four_dims(model, mask, "eager"),
    "allowed": lambda model, mask: four_dims(model, mask, "sdpa"),
    "documents": lambda model, mask: mask * 3,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_masks(form: str) -> None:
    model, mask = replaced("mixtral").float(), BOTH_SIDES  # the original code makes NaN in float64
    given = FORMS[form](model, mask)
    assert given.dim() == (4 if form in ("added", "allowed") else 2)
    seen = seen_masks(model)
    model(input_ids=IDS, attention_mask=given)
    model(IDS, given)
    model.model(inputs_embeds=model.model.embed_tokens(IDS), attention_mask=given)
    assert len(seen) == 6 and all(torch.equal(each, mask.bool()) for each in seen)


def test_several_masks_by_name() -> None:
    """As `generate` passes them to models with sliding windows and static caches, in the order of a set."""
    mask: Any = padding(3, "left")
    assert torch.equal(token_mask({"full_attention": None, "linear_attention": mask}, 3, 7), mask.bool())
    assert token_mask({"full_attention": None}, 3, 7) is None
    masks = {"full_attention": torch.ones(3, 1, 1, 9).bool(), "sliding_attention": torch.zeros(3, 1, 1, 4).bool()}
    first, second = (token_mask(dict(each), 3, 1) for each in (masks.items(), reversed(masks.items())))
    assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.parametrize("given", [torch.ones(3, 7, 7), "causal"], ids=["three dims", "no tensor"])
def test_another_mask_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^attention_mask must have the dims \(batch, keys\) or .* got (3 dims|str)$"):
        replaced("mixtral")(IDS, attention_mask=given)


def test_packed_documents_are_not_padding() -> None:
    eager, ours = small_model("qwen3_moe"), replaced("qwen3_moe")
    ids, positions = IDS.flatten()[None], torch.arange(7).repeat(3)[None]
    seen = seen_masks(ours)
    expected, got = (step(model, ids, position_ids=positions) for model in (eager, ours))
    assert_same(got, expected, None)
    assert seen == [None, None]
    torch.testing.assert_close(got["logits"].view(3, 7, -1), step(ours, IDS)["logits"], rtol=1e-5, atol=1e-5)


# Caches


WINDOW = {"sliding_window": 4}
CHUNKS = {"attention_chunk_size": 4}


@pytest.mark.parametrize(
    ("preset", "window", "cache", "num_beams"),
    [
        ("mixtral", {}, "dynamic", 1),
        ("qwen2_moe", {}, "static", 2),
        ("mixtral", WINDOW, "dynamic", 2),
        ("mixtral", WINDOW, "static", 1),
        ("gpt_oss", WINDOW, "static", 1),  # in every second layer
        ("gpt_oss", WINDOW, "dynamic", 1),
        ("llama4", CHUNKS, "dynamic", 1),
        ("llama4", CHUNKS, "static", 2),
    ],
)
def test_generates_the_same_tokens(preset: str, window: dict[str, Any], cache: str, num_beams: int) -> None:
    mask, generated = padding(3, "left"), []
    eager, ours = small_model(preset, **window).float().eval(), replaced(preset, **window).float().eval()
    seen = seen_masks(ours)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": num_beams}
    for model in (eager, ours):
        options = {"attention_mask": mask, "cache_implementation": cache, "disable_compile": True, **how}
        generated.append(model.generate(IDS, **options))
    assert torch.equal(*generated)
    of_beams = mask.bool().repeat_interleave(num_beams, 0)
    assert len(seen) == 12 and torch.equal(seen[0], of_beams)
    assert all(each is not None and each.shape == (3 * num_beams, 1) and each.all() for each in seen[2:])


def test_padding_among_tokens_after_a_cache() -> None:
    model, cache = replaced("mixtral").eval(), DynamicCache()
    mask = padding(3, "right")
    seen = seen_masks(model)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(IDS[:, :4], attention_mask=mask[:, :4], **{name: cache})
    model(IDS[:, 4:], attention_mask=mask, **{name: cache})
    assert torch.equal(torch.cat(seen[::2], 1), mask.bool())


# Recomputation


def around_layers(model: Any, wrap: Callable[[nn.Module], Any]) -> None:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = wrap(layer)


def around_forwards(modules: list[Any], use_reentrant: bool) -> None:
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=use_reentrant)


RECOMPUTED: dict[str, Callable[[Any], None]] = {
    "by transformers": partial(enable_checkpointing, use_reentrant=False),
    "by transformers, reentrant": partial(enable_checkpointing, use_reentrant=True),
    "layers with their hooks": lambda model: around_layers(model, checkpoint_wrapper),
    "forwards of layers": lambda model: around_forwards([*model.model.layers], False),
    "blocks": lambda model: around_forwards([layer.mlp for layer in model.model.layers], False),
    "blocks, reentrant": lambda model: around_forwards([layer.mlp for layer in model.model.layers], True),
}


@pytest.mark.parametrize("how", RECOMPUTED)
def test_a_recomputation_has_the_mask_of_its_forward(how: str) -> None:
    """Three forwards have masks, one a mask of ones; a forward without a mask comes before their backwards."""
    model = replaced("mixtral", {"load_balance_loss_weight": 0.1, "load_balance_scope": "batch"})
    masks = [padding(3, "left"), padding(3, "right"), torch.ones_like(IDS)]
    accumulator = StatsAccumulator(model)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        run = partial(model, IDS, use_cache=False)
        losses = [run(attention_mask=mask, labels=labels_of(IDS, mask)).loss for mask in masks]
        run()
        for loss in losses:
            loss.backward()
        named = model.named_parameters()
        return {name.replace("_checkpoint_wrapped_module.", ""): each.grad.clone() for name, each in named}

    expected, layers = gradients(), [*accumulator.update().layers.values()]
    RECOMPUTED[how](model)
    assert_same(gradients(), expected, None, 1e-12)
    for stats, before in zip(accumulator.update().layers.values(), layers, strict=True):
        assert torch.equal(stats.tokens_per_expert, before.tokens_per_expert)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_recomputation_without_the_mask_of_its_forward_is_refused() -> None:
    """The forward of compiled code keeps nothing for an uncompiled checkpoint around it."""
    model = replaced("mixtral", num_hidden_layers=1)
    block = model.model.layers[0].mlp
    block.forward = partial(checkpoint, torch.compile(block.forward, backend="eager"), use_reentrant=False)
    with pytest.raises(RuntimeError, match="TransformersMoE is recomputed alone, without the token mask"):
        step(model, IDS, padding(3, "left"))


# Errors and threads


class Stop(BaseException):
    """An exception that does not derive from Exception, like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [RuntimeError, Stop])
def test_after_an_exception_no_mask_is_left(error: type[BaseException]) -> None:
    model = replaced("mixtral")

    def fail(*_: Any) -> None:
        raise error

    handle = model.model.layers[0].self_attn.register_forward_hook(fail)
    with pytest.raises(error):
        model(IDS, attention_mask=padding(3, "left"))
    handle.remove()
    seen = seen_masks(model)
    model(IDS)
    assert seen == [None, None]


def test_two_threads_have_a_mask_each() -> None:
    model = replaced("mixtral").eval()
    masks = [padding(3, "left"), padding(3, "right"), None]
    expected = [model(IDS, attention_mask=mask).logits for mask in masks]

    def run(index: int) -> None:
        for _ in range(20):
            torch.testing.assert_close(model(IDS, attention_mask=masks[index]).logits, expected[index])

    in_threads(*[lambda index=index: run(index) for index in range(3)])
