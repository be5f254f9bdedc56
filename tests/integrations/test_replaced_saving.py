"""Files of models with replaced blocks, read by transformers and PEFT without this library, and back."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from maxmoe import StatsAccumulator
from maxmoe.integrations.transformers import replace_moe_blocks
from support.programs import printed, python
from support.replaced_models import IDS, PRESETS, replaced, small_model, step
from support.sampling import by_default

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing` is deprecated:FutureWarning"
)  # by PEFT, Trainer
SQUARE = {"intermediate_size": 16, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16}
SQUARE |= {"moe_shared_expert_intermediate_size": 16, "shared_expert_intermediate_size": 16, "d_ff": 16}
SQUARE |= {"share_expert_dim": 16}
SQUARE |= {"ffn_config": {"ffn_hidden_size": 16}}
# Reads folders and writes its state dict, in a process that cannot import this library.
READ = """
import sys
sys.modules["maxmoe"] = None
import torch, transformers
for name in sys.argv[1:]:
    (architecture,) = transformers.AutoConfig.from_pretrained(name).architectures
    model, info = getattr(transformers, architecture).from_pretrained(name, output_loading_info=True)
    assert not any(map(len, info.values())), info
    torch.save(model.state_dict(), f"{name}/read.pt")
"""


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].to(value.dtype), value), name  # some are read in float32


def save(preset: str, folder: Path, *, is_square: bool) -> dict[str, Tensor]:
    """Save a model, with F = D, where a transposed matrix has the same shape, in several files; return its state."""
    sizes, options = (SQUARE, {"max_shard_size": "10KB"}) if is_square else ({}, {})
    model = replaced(preset, **sizes).bfloat16()
    model.save_pretrained(folder, **options)
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_folders_are_read(preset: str, tmp_path: Path) -> None:
    """By the code of the family. Every second family is saved with F = D."""
    expected = save(preset, tmp_path, is_square=PRESETS.index(preset) % 2 == 1)
    config = AutoConfig.from_pretrained(tmp_path)
    model, info = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(map(len, info.values())), info
    assert_equal(model.state_dict(), expected)
    assert all("maxmoe" not in file.read_text() for file in tmp_path.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("first_is_square", [False, True])
def test_saved_folders_are_read_without_this_library(tmp_path: Path, first_is_square: bool) -> None:
    """The same by one process that cannot import it; every second family is saved with F = D."""
    expected = {
        preset: save(preset, tmp_path / preset, is_square=number % 2 != first_is_square)
        for number, preset in enumerate(PRESETS)
    }
    printed(python(READ, *(str(tmp_path / preset) for preset in PRESETS)))
    for preset, value in expected.items():
        assert_equal(torch.load(tmp_path / preset / "read.pt"), value)


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_state_are_those_of_transformers(preset: str) -> None:
    eager, ours = small_model(preset), replaced(preset)
    assert list(ours.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in eager.named_parameters()]
    other = small_model(preset)
    for parameter in other.parameters():
        parameter.data.copy_((parameter.data + 1.0).float())  # the router of Switch Transformers is in float32
    ours.load_state_dict(other.state_dict())
    assert_equal(ours.state_dict(), other.state_dict())
    eager.load_state_dict(ours.state_dict())


def test_published_names_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    model = replaced("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    replaced("mixtral").load_state_dict(tensors)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}: must be \(16, 10\), got \(10, 16\)"):
        model.load_state_dict(tensors | {name: tensors[name].T})
    del tensors[name]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.layers.1.mlp.experts.down_proj"'):
        model.load_state_dict(tensors)


def test_a_folder_is_loaded_and_replaced(tmp_path: Path) -> None:
    replaced("qwen2_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert len(replace_moe_blocks(model)) == 2
    torch.testing.assert_close(model(IDS).logits, replaced("qwen2_moe").eval()(IDS).logits)
    model.save_pretrained(tmp_path / "again")
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again")))


# Trainer


def trained(model: nn.Module, folder: Path, resume: bool = False, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 32, (12, 9), generator=torch.manual_seed(1))]
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.parametrize("preset", by_default(["mixtral", "deepseek_v3", "gpt_oss"], ["gpt_oss"]))
def test_trainer_resumes(tmp_path: Path, preset: str) -> None:
    """The checkpoint of step 2 has all weights: two further steps end where four steps do, bit for bit."""
    pytest.importorskip("accelerate")
    sizes = {"intermediate_size": 16} if preset == "mixtral" else {}
    whole = trained(replaced(preset, **sizes).float(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = trained(replaced(preset, **sizes).float(), tmp_path, resume=True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def test_trainer_loads_the_best_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    trainer = trained(replaced("mixtral", intermediate_size=16).float(), tmp_path, learning_rate=0.5, **options)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-4"
    assert_equal(trainer.model.state_dict(), AutoModelForCausalLM.from_pretrained(best).state_dict())


def test_losses_of_trainer_are_those_of_eager(tmp_path: Path) -> None:
    """The losses include the balance loss that transformers adds."""
    pytest.importorskip("accelerate")
    options = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    eager = trained(small_model("qwen3_moe", **options).float(), tmp_path / "eager")
    ours = trained(replaced("qwen3_moe", **options).float(), tmp_path / "ours")
    for got, expected in zip(ours.state.log_history[:4], eager.state.log_history[:4], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)


# PEFT


def adapters(preset: str) -> LoraConfig:
    up = "up_proj" if preset == "nemotron_h" else "gate_up_proj"
    parameters = ["gate.weight"] if preset == "mixtral" else []
    return LoraConfig(
        r=2,
        target_parameters=[f"experts.{up}", "experts.down_proj", *parameters],
        target_modules={"qwen2_moe": ["q_proj", "shared_expert.up_proj"], "nemotron_h": []}.get(preset, ["o_proj"]),
        init_lora_weights=False,
    )


ADAPTED = ["mixtral", "qwen2_moe", "deepseek_v3", "nemotron_h", "gpt_oss", "llama4"]


@pytest.mark.parametrize("preset", by_default(ADAPTED, [preset for preset in ADAPTED if preset != "deepseek_v3"]))
def test_adapters_load_in_the_other_model(tmp_path: Path, preset: str) -> None:
    torch.manual_seed(3)
    config = adapters(preset)
    models = {"eager": get_peft_model(small_model(preset), config), "ours": get_peft_model(replaced(preset), config)}
    steps = {}
    for name, model in models.items():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.1)
        steps[name] = step(model, IDS)
        model.save_pretrained(tmp_path / name)
    for name, other in (("eager", replaced(preset)), ("ours", small_model(preset))):
        model = PeftModel.from_pretrained(other, tmp_path / name, is_trainable=True)
        got = step(model, IDS)
        assert got.keys() == steps[name].keys() and any("lora_" in key for key in got)
        for key, value in steps[name].items():
            torch.testing.assert_close(got[key].to(value.dtype), value, rtol=1e-4, atol=1e-6, msg=key)


def test_adapters_beside_experts_form_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from maxmoe.integrations.transformers import experts

    taken = []
    operator = experts.expert_ffn
    monkeypatch.setattr(
        experts,
        "expert_ffn",
        lambda *args, **options: taken.append(args[4].factors) or operator(*args, **options),
    )
    model = get_peft_model(replaced("mixtral"), adapters("mixtral"))
    accumulator = StatsAccumulator(model)
    step(model, IDS)
    assert len(taken) == 2 and None not in taken and len(accumulator.update().layers) == 2
