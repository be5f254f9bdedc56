"""Adapters in the files of inference servers: merged as a server reads them, they give the logits of PEFT."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from maxmoe.integrations.transformers import export_adapter, replace_moe_blocks
from support.adapted import OTHER_RANKS, STACKS, WARNINGS
from support.replaced_models import IDS, small_model

pytestmark = WARNINGS


def adapted(preset: str, targets: list[str] = STACKS, modules: Any = ("o_proj",), **options: Any) -> PeftModel:
    """A model with adapters that are not zero, of experts and of one linear module."""
    torch.manual_seed(3)
    settings = {"r": 2, "lora_alpha": 3, "init_lora_weights": False} | options
    model = small_model(preset).eval()
    return get_peft_model(model, LoraConfig(target_parameters=targets, target_modules=[*modules], **settings))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def read(folder: Path) -> tuple[dict[str, Tensor], float, dict[str, Any]]:
    """The data that a server reads: factors by module, and one scale for all of them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert all(name.startswith(prefix) and name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors)
    return (
        {name.removeprefix(prefix): each for name, each in tensors.items()},
        config["lora_alpha"] / config["r"],
        config,
    )


@pytest.mark.parametrize("preset", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "minimax_m2", "nemotron_h"])
def test_per_expert_names_are_those_of_published_files(preset: str, tmp_path: Path) -> None:
    """Each pair of factors is added to the matrix of its name in a published file; transformers reads the file."""
    is_gated = preset != "nemotron_h"
    model = adapted(preset, STACKS if is_gated else ["experts.up_proj", "experts.down_proj"],
                    ["o_proj"] if is_gated else ["shared_experts.up_proj"], **OTHER_RANKS)  # fmt: skip
    base = model.get_base_model()
    export_adapter(model, tmp_path / "served", layout="per_expert")
    factors, scale, config = read(tmp_path / "served")
    assert config["r"] == (5 if is_gated else 3)
    assert all(each.shape[name.endswith("lora_B.weight")] == config["r"] for name, each in factors.items())
    expected = logits(model)
    without = logits(small_model(preset).eval())
    small_model(preset).save_pretrained(tmp_path / "merged")
    files = [*(tmp_path / "merged").glob("*.safetensors")]
    published = {name: each for file in files for name, each in load_file(file).items()}
    num_experts = len(model.get_submodule(next(path for path, _ in experts_of(model))).down_proj)
    names = {name.rpartition(".lora_")[0] for name in factors}
    for name in names:
        key = f"{name}.weight" if preset != "nemotron_h" else f"{name}.weight".replace("model.", "backbone.", 1)
        published[key] += scale * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
    assert len([name for name in names if ".experts." in name]) == 2 * num_experts * (3 if is_gated else 2)
    assert {*config["target_modules"]} - {"o_proj"} == {"up_proj", "down_proj"} | ({"gate_proj"} if is_gated else set())
    for file in files:
        save_file(published, file, {"format": "pt"})
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    merged = type(base).from_pretrained(tmp_path / "merged", **options).eval()  # type: ignore[attr-defined]
    torch.testing.assert_close(logits(merged), expected, rtol=1e-12, atol=1e-12)
    assert (expected - without).abs().max() > 1e-2


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(path, each) for path, each in model.named_modules() if hasattr(type(each), "_apply_gate")]
    assert found
    return found


def of_vllm(factors: dict[str, Tensor], path: str, count: int) -> dict[str, Tensor]:
    """Products (E, out, in) by parameter; `base_layer` has gate and up, and the expert is the fastest index of B."""
    products = {}
    for parameter, name in {"gate_up_proj": f"{path}.base_layer", "down_proj": path}.items():
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        rank = len(a) // count
        each = [b[:, expert::count] @ a[expert * rank : (expert + 1) * rank] for expert in range(count)]
        products[parameter] = torch.stack(each)
    return products


def of_sglang(factors: dict[str, Tensor], path: str, count: int) -> dict[str, Tensor]:
    """Products (E, out, in) by parameter, of tensors with three dims; both halves of gate_up_proj share one A."""
    products = {}
    for parameter in ("gate_up_proj", "down_proj"):
        a, b = (factors[f"{path}.{parameter}.lora_{factor}.weight"] for factor in "AB")
        assert a.dim() == b.dim() == 3 and len(a) == count
        products[parameter] = torch.einsum("eor,eri->eoi", b, a)
    return products


@pytest.mark.parametrize(
    ("preset", "layout", "products", "block"),
    [
        ("gpt_oss", "vllm_stacked", of_vllm, "mlp"),
        ("mixtral", "vllm_stacked", of_vllm, "block_sparse_moe"),
        ("qwen3_moe", "sglang_stacked", of_sglang, "mlp"),
        ("minimax_m2", "sglang_stacked", of_sglang, "block_sparse_moe"),
    ],
)
def test_stacks_are_read_as_the_server_does(
    preset: str, layout: Any, products: Callable[..., dict[str, Tensor]], block: str, tmp_path: Path
) -> None:
    model = adapted(preset, use_rslora=True)
    expected = logits(model)
    export_adapter(model, tmp_path, layout=layout)
    factors, scale, _ = read(tmp_path)
    assert scale == pytest.approx(3 / 2**0.5)
    plain = small_model(preset).eval()
    used = set()
    with torch.no_grad():
        for path, experts in experts_of(plain):
            served = path.replace(".mlp.", f".{block}.")
            for parameter, product in products(factors, served, len(experts.down_proj)).items():
                getattr(experts, parameter).add_(scale * (product.mT if experts.is_transposed else product))
            used |= {name for name in factors if name.startswith(f"{served}.")}
        for name in factors.keys() - used:
            module = name.rpartition(".lora_")[0]
            if name.endswith("lora_A.weight"):
                plain.get_submodule(module).weight += scale * factors[f"{module}.lora_B.weight"] @ factors[name]
    torch.testing.assert_close(logits(plain), expected, rtol=1e-12, atol=1e-12)


def test_replaced_blocks_saved_adapters_and_one_projection(tmp_path: Path) -> None:
    """The same file as for the original blocks. Projections without an adapter have factors of zero."""
    own = adapted("qwen3_moe", ["experts.down_proj"])
    own.save_pretrained(tmp_path / "trained")
    export_adapter(own, tmp_path / "own", layout="per_expert")
    model = small_model("qwen3_moe").eval()
    replace_moe_blocks(model)
    loaded = PeftModel.from_pretrained(model, tmp_path / "trained", adapter_name="other")
    export_adapter(loaded, tmp_path / "replaced", layout="per_expert", adapter="other")
    expected, got = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "replaced"))
    assert expected.keys() == got.keys() and all(torch.equal(each, got[name]) for name, each in expected.items())
    for name, each in got.items():
        assert bool(each.any()) == ("down_proj" in name or "o_proj" in name), name
        assert each.shape[0 if "lora_A" in name else 1] == 2


def changed(model: PeftModel, **fields: Any) -> PeftModel:
    for name, value in fields.items():
        setattr(model.peft_config["default"], name, value)
    return model


def renamed() -> PeftModel:
    model = adapted("qwen3_moe")
    model.get_base_model().config.model_type = "gemma4_text"
    return model


def ungated() -> PeftModel:
    return adapted("nemotron_h", ["experts.up_proj", "experts.down_proj"], ["shared_experts.up_proj"])


# What a server would drop, layouts that a family does not have, and wrong arguments.
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (
        lambda: adapted("qwen3_moe", modules_to_save=["lm_head"]),
        {},
        "servers do not read modules_to_save of an adapter",
    ),
    (lambda: adapted("qwen3_moe", [], use_dora=True), {}, "servers read factors of two dims"),
    (lambda: adapted("qwen3_moe", [*STACKS, "gate.weight"]), {}, "servers read adapters of linear modules and of "),
    (lambda: changed(adapted("qwen3_moe"), init_lora_weights="pissa"), {}, "init_lora_weights='pissa' has changed the"),
    (lambda: changed(adapted("qwen3_moe"), trainable_token_indices=[1]), {}, "servers do not read trainable_token_ind"),
    (
        lambda: adapted("qwen3_moe"),
        {"layout": "gguf"},
        "layout must be one of per_expert, vllm_stacked, sglang_stacked,",
    ),
    (lambda: adapted("gpt_oss"), {}, "layout 'per_expert' needs published names of the matrices of an expert; GptOss"),
    (
        lambda: adapted("gpt_oss"),
        {"layout": "sglang_stacked"},
        "layout 'sglang_stacked' needs the gate before up, in G",
    ),
    (
        lambda: adapted("llama4"),
        {"layout": "vllm_stacked"},
        "must be experts of transformers with an interface for imp",
    ),
    (renamed, {"layout": "vllm_stacked"}, "vLLM leaves out stacked adapters of Qwen3MoeExperts of model.layers.0.mlp"),
    (ungated, {"layout": "vllm_stacked"}, "layout 'vllm_stacked' needs experts with a gate, NemotronHExperts of"),
    (lambda: small_model("mixtral"), {}, "export_adapter needs a model of PEFT, got MixtralForCausalLM"),
    (lambda: adapted("mixtral"), {"adapter": "other"}, "adapter must be one of ['default'], got 'other'"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refusals(make: Callable[[], Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        export_adapter(make(), tmp_path / "out", **{"layout": "per_expert", **options})
    assert not (tmp_path / "out").exists()
