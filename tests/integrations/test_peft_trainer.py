"""Adapters trained by the Trainer of transformers: losses and saved adapters fit the code of the family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

pytest.importorskip("transformers")

import maxmoe.integrations.transformers as _integration  # noqa: F401  # registers "maxmoe"
from support.sampling import by_default
from support.small_models import model_of

STEPS = 3
TOKENS = torch.randint(3, 32, (8, 12), generator=torch.Generator().manual_seed(0))

# PEFT reads a deprecated property of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")


def base_model(preset: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model: Any = model_of(preset).float()
    model.set_experts_implementation(implementation)
    return model


def train(model: nn.Module, folder: Path) -> list[float]:
    """The loss of each step, in float32."""
    from transformers import Trainer, TrainingArguments

    options = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(input_ids=TOKENS).logits
    return result


@pytest.mark.parametrize("preset", by_default(["qwen3_moe", "gpt_oss"], ["gpt_oss"]))
def test_losses_and_saved_adapters_are_those_of_eager(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = LoraConfig(
        r=4, target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=["q_proj", "v_proj"]
    )
    losses = {}
    for implementation in ("eager", "maxmoe"):
        base = base_model(preset, implementation)
        torch.manual_seed(1)
        model = get_peft_model(base, config)
        losses[implementation] = train(model, tmp_path / "trainer")
    assert len({*losses["maxmoe"]}) == STEPS
    torch.testing.assert_close(torch.tensor(losses["maxmoe"]), torch.tensor(losses["eager"]), rtol=2e-5, atol=0)

    model.save_pretrained(tmp_path / "adapters")  # the adapters trained with maxmoe
    loaded = PeftModel.from_pretrained(base_model(preset, "eager"), tmp_path / "adapters")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    with loaded.disable_adapter():
        assert (logits(loaded) - logits(model)).abs().max() > 1e-2
