"""Models on a device beside the same models on the CPU.

    python -m device.models --device cuda --out results.json

Training by AdamW and Muon, generation, adapters of PEFT, a model of transformers, a mesh of one rank.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import maxmoe
from device.cases import Cases, UnavailableError, Values, main, rounded, within
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import Mesh

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
EXPERTS: dict[str, Any] = {"intermediate_size": 32, "num_experts": 8, "top_k": 2, "load_balance_loss_weight": 0.01}
NUM_STEPS, NUM_EARLY_STEPS = 20, 5


def decoder() -> Decoder:
    torch.manual_seed(0)
    moe = maxmoe.MoEConfig(hidden_size=64, **EXPERTS)
    return Decoder(DecoderConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, moe=moe))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in found.items()}


def losses(model: Decoder, tokens: Tensor, make: MakeOptimizer, num_steps: int, autocast: bool) -> list[float]:
    """Train and return the loss of every step."""
    optimizer, values = make(model), []
    for _ in range(num_steps):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            out = model(tokens[:, :-1])
        loss = cross_entropy(out.logits.float().flatten(0, 1), tokens[:, 1:].flatten()) + out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        maxmoe.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values.append(loss.item())
    return values


def training(
    cases: Cases, make_optimizer: MakeOptimizer, limit: float, early_limit: float, *, autocast: bool = False
) -> Values:
    """Train on the device and in float32 on the CPU, and compare the losses of all steps and of the first ones."""
    model = decoder()
    other = copy.deepcopy(model).to(cases.device)
    num_steps = 3 if cases.is_tiny else NUM_STEPS
    start = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + 3 * torch.arange(33)) % 64
    expected = losses(model, tokens, make_optimizer, num_steps, autocast=False)
    got = losses(other, tokens.to(cases.device), make_optimizer, num_steps, autocast)
    errors = [abs(one - two) / two for one, two in zip(got, expected, strict=True)]
    error, early_error = rounded(max(errors)), rounded(max(errors[:NUM_EARLY_STEPS]))
    ends = {"first_loss": got[0], "last_loss": got[-1], "last_loss_on_cpu": expected[-1]}
    limits = {"error": error, "limit": limit, "early_error": early_error, "early_limit": early_limit}
    return {**ends, **limits, "ok": error < limit and early_error < early_limit}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def muon(dtype: torch.dtype | None) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = maxmoe.optim.parameter_groups(model)
        return maxmoe.optim.Muon(groups, lr=3e-3, adjust_lr_fn="match_rms_adamw", ns_dtype=dtype)

    return make


def check_training(cases: Cases) -> None:
    """Train decoders with AdamW and Muon.

    Newton-Schulz is in bfloat16 by default if the device multiplies it. Its rounding depends on the order of sums, and
    training amplifies the difference: losses of two paths on one CPU are 1e-5 apart in the first five of these steps
    and 3e-3 after twenty; with Newton-Schulz in float32 6e-7. So Muon is compared closely in float32, and with its
    default closely in the first steps alone.
    """
    cases.run("training", "AdamW", training, adamw, 1e-4, 1e-4)
    cases.run("training", "AdamW, autocast", training, adamw, 5e-2, 1e-2, autocast=True)
    cases.run("training", "Muon, ns_dtype=float32", training, muon(torch.float32), 1e-4, 1e-4)
    cases.run("training", "Muon", training, muon(None), 5e-2, 1e-3)
    cases.run("training", "Muon, autocast", training, muon(None), 5e-2, 1e-2, autocast=True)


def generation(cases: Cases) -> Values:
    """Greedy tokens of the device and of the CPU are the same."""
    model = decoder().eval()
    tokens = torch.randint(64, (2, 7))
    expected = model.generate(tokens, 12, temperature=0.0)
    got = copy.deepcopy(model).to(cases.device).generate(tokens.to(cases.device), 12, temperature=0.0)
    return {"ok": torch.equal(got.cpu(), expected)}


def adapters(cases: Cases) -> Values:
    """Gradients of PEFT's adapters beside frozen experts."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    torch.manual_seed(0)
    targets = [f"experts.{name}_proj" for name in ("gate", "up", "down")]
    model = nn.Sequential(maxmoe.MoEFeedForward(maxmoe.MoEConfig(hidden_size=64, **EXPERTS)))
    config = LoraConfig(r=4, target_parameters=targets, target_modules=[], init_lora_weights=False)
    model = get_peft_model(model, config)
    other = copy.deepcopy(model).to(cases.device)
    x = torch.randn(2, 16, 64)
    model.double()(x.double()).square().mean().backward()
    other(x.to(cases.device)).square().mean().backward()
    return within(1e-4, gradients(other), gradients(model))


def transformers_model(cases: Cases) -> Values:
    """Gradients of a model of transformers with "maxmoe" beside its own loop over experts in float64."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        import maxmoe.integrations.transformers  # noqa: F401  # registers the implementation
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).double()
    other = copy.deepcopy(model).float().to(cases.device)
    tokens = torch.randint(64, (2, 16))
    for each, implementation in ((model, "eager"), (other, "maxmoe")):
        each.set_experts_implementation(implementation)
        ids = tokens.to(each.device)
        each(input_ids=ids, labels=ids).loss.backward()
    return within(1e-4, gradients(other), gradients(model))


def one_rank(cases: Cases, rules: str) -> Values:
    """Gradients of a decoder on a mesh of one rank: DTensors and every collective, without other ranks."""
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        options = {"backend": "nccl", "device_id": torch.device("cuda", 0)} if cases.is_cuda else {"backend": "gloo"}
        dist.init_process_group(init_method=f"file://{store}", rank=0, world_size=1, **options)
    model = decoder()
    other = copy.deepcopy(model).to(cases.device)
    maxmoe.parallelize(other, Mesh({"fsdp": 1, "expert": 1}, device_type=cases.device.type), rules)
    tokens = torch.randint(64, (4, 16))
    for each, ids in ((model, tokens), (other, tokens.to(cases.device))):
        out = each(ids)
        (cross_entropy(out.logits.flatten(0, 1), ids.flatten()) + out.aux_loss).backward()
    return within(1e-4, gradients(other), gradients(model))


def check(cases: Cases) -> None:
    """Check models."""
    check_training(cases)
    cases.run("models", "greedy generation", generation)
    cases.run("models", "adapters of PEFT", adapters)
    if not cases.is_tiny:  # importing transformers takes longer than the rest of the dry run
        cases.run("models", "transformers", transformers_model)
    backend = "NCCL" if cases.is_cuda else "gloo"
    for rules in ("ep-as-dp", "default", "ep-tp")[: 1 if cases.is_tiny else None]:
        cases.run("models", f"one rank, {backend}, {rules}", one_rank, rules)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main("models", check)
