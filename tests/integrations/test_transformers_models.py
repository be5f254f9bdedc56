"""Whole models of transformers with maxmoe as their experts implementation, against their own code."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from finetuning import models
from maxmoe.integrations.transformers import experts as implementation
from maxmoe.integrations.transformers import patched_families
from pretraining import InputError
from support.operator_calls import assert_near
from support.operator_checks import compile_whole
from support.replaced_models import enable_checkpointing
from support.sampling import by_default, cases_by_default
from support.small_models import WithoutFloat32

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"]
# Experts without biases, experts with biases and a gate of their own, and a block that maxmoe patches.
DIFFERENT = {"mixtral", "gpt_oss", "llama4_text"}
each_family = pytest.mark.parametrize("family", by_default(FAMILIES, DIFFERENT))
IN_BFLOAT16 = [("mixtral", True), ("gpt_oss", False), ("llama4_text", True)]
# Models whose config needs more than small numbers; test_transformers_families.py tests their experts.
NOT_SMALL = {"dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "lfm2_moe", "mimo_v2_flash", "qwen4_exp"}
NOT_SMALL |= {"qwen4_exp_text"}
# Models with linear attention or Mamba, which transformers computes slowly on a CPU; qwen3_5_moe_text is one of them.
SLOW = {"bailing_hybrid", "kimi_linear", "granitemoehybrid", "qwen3_5_moe", "qwen3_next"}
# Models that have no experts in the first two layers, or other ones in later layers.
FOUR_LAYERS = {"beam", "deepseek_v4", "flint", "qwen4_exp", "qwen4_exp_text"}
OPTIONS = {"hidden_size": 64, "intermediate_size": 13, "num_experts": 7, "seed": 0}


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """A small model with its own code, and with every kind of loss that it has."""
    top_k = 1 if family == "zaya" else 2  # the only value that it supports
    num_layers = 4 if family in FOUR_LAYERS else 2
    options = Namespace(family=family, top_k=top_k, num_layers=num_layers, **OPTIONS)
    model = models.small_model(options, "eager").to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough to differ
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    return model


def tokens(length: int = 9) -> Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(2))


@contextmanager
def operators_called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The called operators: an implementation that is silently ignored would have the same results, too."""
    called: list[str] = []

    def counted(operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> Tensor:
            called.append(operator.__name__)
            return operator(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((implementation, "expert_ffn"), (implementation, "gmm"), (patched_families, "expert_ffn")):
            patch.setattr(module, name, counted(getattr(module, name)))
        yield called


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Logits, losses and gradients."""
    torch.manual_seed(3)  # some routers add noise
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    values = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    if getattr(out, "aux_loss", None) is not None:
        values["aux_loss"] = out.aux_loss.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return values | {name: gradient.clone() for name, gradient in gradients.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        if max(value.abs().max(), got[name].abs().max()) > 1e-12:  # rounding, where the exact value is zero
            assert_near(got[name], value, relative, name)


@pytest.mark.parametrize("family", by_default(models.family_names(), {*models.family_names()} - SLOW))
def test_equals_the_code_of_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in NOT_SMALL:
        with pytest.raises(InputError, match="cannot make a small model of the family"):
            build(family)
        return
    model, ids = build(family), tokens()
    with WithoutFloat32(), operators_called(monkeypatch) as called:
        expected = step(model, ids)
        assert not called
        model.set_experts_implementation("maxmoe")
        assert_same(step(model, ids), expected, 1e-12)
        assert called


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_the_balance_loss_is_among_them(family: str) -> None:
    model = build(family)
    model.set_experts_implementation("maxmoe")
    assert step(model, tokens())["aux_loss"] > 0


@each_family
def test_five_steps(family: str) -> None:
    trained = []
    for name in ("eager", "maxmoe"):
        model = build(family)
        model.set_experts_implementation(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(5):
            losses.append(step(model, tokens())["loss"])
            optimizer.step()
        assert losses[-1] < losses[0]
        trained.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    assert_same(trained[1], trained[0], 2e-6)


@each_family
def test_generates_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded by `from_pretrained`, as users do."""
    build(family, torch.float32).save_pretrained(tmp_path)
    generated = []
    for name in ("eager", "maxmoe"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=name).eval()
        with operators_called(monkeypatch) as called:
            generated.append(model.generate(tokens(4), max_new_tokens=12, do_sample=False, pad_token_id=0))
        assert bool(called) == (name == "maxmoe")
    assert generated[0].shape == (2, 16) and torch.equal(*generated)


@each_family
def test_gradient_checkpointing(family: str) -> None:
    model = build(family).train()
    model.set_experts_implementation("maxmoe")
    expected = step(model, tokens())
    enable_checkpointing(model, use_reentrant=False)
    assert_same(step(model, tokens()), expected, 1e-12)


@pytest.mark.parametrize(("family", "is_autocast"), cases_by_default(product(FAMILIES, [False, True]), IN_BFLOAT16))
def test_bfloat16(family: str, is_autocast: bool) -> None:
    """The error against the float64 model is at most some times the error of the model's own code."""
    exact = step(build(family), tokens())["logits"]
    model = build(family, torch.float32 if is_autocast else torch.bfloat16)
    errors = {}
    for name in ("eager", "maxmoe"):
        model.set_experts_implementation(name)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            got = step(model, tokens())
        assert all(gradient.isfinite().all() for gradient in got.values())
        errors[name] = (got["logits"].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert errors["maxmoe"] < 2 * errors["eager"] < 0.5


# By default the block that maxmoe patches. test_transformers_experts.py compiles the experts of the others.
@pytest.mark.parametrize("family", by_default(FAMILIES, ["llama4_text"]))
def test_the_block_compiles_without_graph_breaks(family: str) -> None:
    model = build(family)
    model.set_experts_implementation("maxmoe")
    path = next(name for name, _ in model.named_modules() if name.endswith(".experts")).removesuffix(".experts")
    block = model.get_submodule(path)
    x = torch.randn(2, 9, OPTIONS["hidden_size"], dtype=torch.float64, requires_grad=True)

    def result(function: Any) -> tuple[Tensor, ...]:
        out = function(x)
        out = out[0] if isinstance(out, tuple) else out
        leaves = [x, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    for got, expected in zip(result(compile_whole(block, "aot_eager")), result(block), strict=True):
        torch.testing.assert_close(got, expected)
