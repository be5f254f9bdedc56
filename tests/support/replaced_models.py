"""Small models of transformers with their own blocks and with replaced ones, and their values in a training step."""

from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.integrations.transformers import replace_moe_blocks
from support.operator_calls import assert_near
from support.small_models import CONVERTED_ONLY, MODELS, model_of

PRESETS = [preset for preset in MODELS if preset not in CONVERTED_ONLY]
IDS = torch.randint(3, 32, (3, 7), generator=torch.Generator().manual_seed(5))
# transformers computes norms, and some routers, in float32 in a model in float64.
TOLERANCE = 1e-5


def small_model(preset: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    latent = {"deepseek_v2", "deepseek_v3", "kimi_k2", "longcat_flash"}
    options: dict[str, Any] = {"head_dim": 4} if preset in latent else {}  # as their config makes it
    if preset == "qwen3_next":  # whose linear attention takes half a second in a step on a CPU
        options["layer_types"] = ["full_attention"] * overrides.get("num_hidden_layers", 2)
    return model_of(preset, **options, **overrides).double().train()


def replaced(preset: str, training: Any = {}, **overrides: Any) -> Any:  # noqa: B006
    model = small_model(preset, **overrides)
    replace_moe_blocks(model, **training)
    return model


def padding(batch: int, side: str) -> Tensor:
    """A mask ``(batch, 7)`` in which the first and the last sequence have padding."""
    mask = torch.ones(batch, 7, dtype=torch.int64)
    for row in range(0, batch, 2):
        mask[row, slice(0, 2 + row) if side == "left" else slice(5 - row, 7)] = 0
    return mask


def labels_of(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Labels without padding, and without tokens after padding, which padding would predict."""
    if mask is None:
        return ids
    is_after_padding = nn.functional.pad(mask[:, :-1], (1, 0), value=1) == 0
    return ids.masked_fill((mask == 0) | is_after_padding, -100)


def step(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """Logits, losses, router logits ``(layers, batch, length, experts)`` and all gradients."""
    model.zero_grad()
    given = {} if mask is None else {"attention_mask": mask}
    out = model(input_ids=ids, labels=labels_of(ids, mask), use_cache=False, **given, **options)
    out.loss.backward()
    values = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    for name in ("aux_loss", "router_logits"):
        value = getattr(out, name, None)
        if value is not None:
            values[name] = value if isinstance(value, Tensor) else torch.stack(value).unflatten(1, ids.shape)
            values[name] = values[name].detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return values | {name: gradient.clone() for name, gradient in gradients.items()}


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """Turn on the gradient checkpointing of transformers, whose method was renamed in 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def assert_same(
    got: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None, relative: float = TOLERANCE
) -> None:
    """Compare values of `step`; logits of valid tokens only."""
    # With one parameter per matrix, experts without tokens have no gradient in the code of transformers.
    assert got.keys() >= expected.keys() and not any(got[name].any() for name in got.keys() - expected.keys())
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        both = [got[name], value]
        if mask is not None and name in ("logits", "router_logits"):
            both = [each.movedim(-1, 0)[..., mask.bool()] for each in both]
        if max(each.abs().max() for each in both) > min(relative, 1e-6):  # rounding, where the exact value is zero
            assert_near(*both, relative, name)  # type: ignore[call-arg]


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare state dicts bit for bit; transformers reads some values in float32."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].to(value.dtype), value), name


def summed_step(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The sum of the losses of the tokens, which ranks can add up; one backward."""
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    targets = labels_of(ids, mask)[:, 1:]
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def assert_same_gradients(model: nn.Module, whole: nn.Module, relative: float = TOLERANCE) -> None:
    """Compare the gradients of a model on ranks with one process's."""
    for name, parameter in whole.named_parameters():
        gradient = model.get_parameter(name).grad
        if parameter.grad is None:  # experts without tokens, in families with a parameter per matrix
            assert gradient is None or not gradient.any(), name
        elif parameter.grad.abs().max() > 1e-6:  # rounding, where the exact value is zero
            assert_near(gradient.full_tensor() if is_dtensor(gradient) else gradient, parameter.grad, relative, name)
