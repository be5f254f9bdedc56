"""Trainers of other libraries: the losses with maxmoe equal the losses of the code of transformers in every step.

Losses are printed in float32, so they agree to a few units of its precision.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe.integrations.transformers import replace_moe_blocks
from support.small_models import model_of

STEPS = 3
TOKENS = torch.randint(3, 32, (8, 12), generator=torch.Generator().manual_seed(0))


def eager() -> nn.Module:
    torch.manual_seed(0)
    return model_of("qwen3_moe", router_aux_loss_coef=0.0).float()


def operators() -> nn.Module:
    model = eager()
    model.set_experts_implementation("maxmoe")  # type: ignore[operator]
    return model


def layers() -> nn.Module:
    model: Any = eager()
    replace_moe_blocks(model)
    return model


def assert_equal_losses(losses: list[float], expected: list[float]) -> None:
    assert len({*losses}) == STEPS
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)


pytestmark = [
    # Of these libraries about themselves and about torch.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]
MODELS = pytest.mark.parametrize("make_model", [operators, layers])


def trainer_options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def logged_losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@MODELS
def test_transformers_trainer(tmp_path: Path, make_model: Any) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def losses(model: nn.Module) -> list[float]:
        data = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
        options = TrainingArguments(**trainer_options(tmp_path))
        return logged_losses(Trainer(model, options, train_dataset=data))

    assert_equal_losses(losses(make_model()), losses(eager()))


@MODELS
def test_sft_trainer(tmp_path: Path, make_model: Any) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def losses(model: nn.Module) -> list[float]:
        data = Dataset.from_dict({"input_ids": TOKENS.tolist()})
        options = trl.SFTConfig(**trainer_options(tmp_path), bf16=False, max_length=None)
        trainer = trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer())
        return logged_losses(trainer)

    assert_equal_losses(losses(make_model()), losses(eager()))


def tokenizer() -> Any:
    """SFTTrainer requires a tokenizer, though the data are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


@MODELS
def test_lightning(tmp_path: Path, make_model: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def losses(model: nn.Module) -> list[float]:
        module = Module(model)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, torch.utils.data.DataLoader(TOKENS, batch_size=2))
        return module.losses

    assert_equal_losses(losses(make_model()), losses(eager()))
