"""Trainers of other libraries: losses, adapters and checkpoints are those of the code of transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from integrations.trainers import TOKENS, fit_with_lightning, trainer_options, transformers_trainer
from maxmoe.integrations.transformers import replace_moe_blocks
from support.replaced_models import assert_equal
from support.small_models import model_of

STEPS = 3
# Losses are printed in float32, so they agree to a few units of its precision.
LOSS_TOLERANCE = {"rtol": 2e-5, "atol": 0.0}
# Of these libraries about themselves and about torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def eager(preset: str = "qwen3_moe", **options: Any) -> Any:
    torch.manual_seed(0)
    return model_of(preset, **options).float()


def with_operators(preset: str = "qwen3_moe", **options: Any) -> Any:
    model = eager(preset, **options)
    model.set_experts_implementation("maxmoe")
    return model


def with_layers(preset: str = "qwen3_moe", **options: Any) -> Any:
    model = eager(preset, **options)
    replace_moe_blocks(model)
    return model


def logged_losses(trainer: Any) -> Tensor:
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def of_transformers(model: nn.Module, folder: Path) -> Tensor:
    pytest.importorskip("accelerate")
    return logged_losses(transformers_trainer(model, folder, max_steps=STEPS))


def of_trl(model: nn.Module, folder: Path) -> Tensor:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # SFTTrainer requires a tokenizer, though the data are tokens already.
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    data = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    arguments = trl.SFTConfig(**trainer_options(folder, max_steps=STEPS), bf16=False, max_length=None)
    return logged_losses(trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer))


def of_lightning(model: nn.Module, folder: Path) -> Tensor:
    lightning = pytest.importorskip("lightning")
    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    fit_with_lightning(Module(), folder, max_steps=STEPS, logger=False)
    return torch.tensor(losses)


@pytest.mark.parametrize("losses", [of_transformers, of_trl, of_lightning])
def test_losses_are_those_of_transformers(losses: Any, tmp_path: Path) -> None:
    """With the balance loss of transformers, which TRL does not add."""
    balance = {"router_aux_loss_coef": 0.0 if losses is of_trl else 0.5, "output_router_logits": losses is not of_trl}
    expected = losses(eager(**balance), tmp_path)
    assert len({*expected.tolist()}) == STEPS
    for make in (with_operators, with_layers):
        torch.testing.assert_close(losses(make(**balance), tmp_path), expected, **LOSS_TOLERANCE)


# Checkpoints of models with replaced blocks, which have the names of published files


def test_trainer_resumes(tmp_path: Path) -> None:
    """The checkpoint of step 2 has all weights: two further steps end where four steps do, bit for bit."""
    pytest.importorskip("accelerate")
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = transformers_trainer(with_layers("deepseek_v3", head_dim=4), tmp_path, **saving)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = transformers_trainer(with_layers("deepseek_v3", head_dim=4), tmp_path, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def test_trainer_loads_the_best_model(tmp_path: Path) -> None:
    """Of a family with F = D, where a transposed matrix has the same shape."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    saving = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options = {"load_best_model_at_end": True, "max_steps": 4, "learning_rate": 0.5}
    trainer = transformers_trainer(with_layers("mixtral", intermediate_size=16), tmp_path, **saving, **options)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-4"
    assert_equal(trainer.model.state_dict(), AutoModelForCausalLM.from_pretrained(best).state_dict())
