"""`examples/finetune_quantized.py`: whole runs, resumption, published checkpoints, and mistakes of users."""

import json
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.pretrain_run import InputError

pytest.importorskip("transformers")
pytest.importorskip("peft")

import finetune_quantized
from finetuning import quantized_models
from finetuning.adapter_training import AdapterTraining
from maxmoe.quantization import QuantizedWeight, state_with_stacks

TINY = ["--num-layers", "2", "--batch-size", "2", "--sequence-length", "16", "--steps", "4", "--threads", "1"]


def options(*arguments: str) -> Namespace:
    return finetune_quantized.parse_options([*TINY, *arguments])


def run(text: Path, out: Path, *arguments: str) -> int:
    chosen = options("--data", str(text), "--out", str(out), *arguments)
    if "--resume" in arguments:
        chosen.steps = None
    return finetune_quantized.run(chosen, ["finetune_quantized.py"])


def losses(out: Path) -> list[float]:
    return json.loads((out / "checkpoint/training.json").read_text())["training"]


def trained(text: Path, out: Path, *arguments: str) -> list[float]:
    """Losses of a whole run."""
    assert run(text, out, *arguments) == 0
    return losses(out)


def published(folder: Path, **changes: Any) -> Path:
    """A small checkpoint with the names and layouts of gpt-oss-20b: two files and a config."""
    from safetensors.torch import save_file

    config = quantized_models.random_config("small", 2)
    model = quantized_models.random_model(config, seed=1)
    tensors: dict[str, Tensor] = {}
    for name, parameter in state_with_stacks(model).items():
        if isinstance(parameter, QuantizedWeight):
            experts, outputs, _ = parameter.codes.shape
            tensors[f"{name}_blocks"] = parameter.codes.reshape(experts, outputs, -1, 16)
            tensors[f"{name}_scales"] = parameter.scales + torch.randint(0, 2, parameter.scales.shape)
            tensors[f"{name}_scales"] = tensors[f"{name}_scales"].to(torch.uint8)
        else:
            tensors[name] = torch.randn_like(parameter) * 0.1 if "bias" in name else parameter.detach()
    tensors = {name: changes.pop(name, tensor) for name, tensor in tensors.items()}
    folder.mkdir()
    names = [name for name, tensor in tensors.items() if tensor is not None]
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    values = {**config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT reads a deprecated property
def test_the_loss_goes_down_and_the_adapters_are_those_of_peft(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    out = tmp_path / "out"
    history = trained(text, out, "--steps", "30", "--learning-rate", "0.01")
    assert history[0] > 5 and history[-1] < history[0] - 1
    assert "Experts: 1 MB, 0.266 of bfloat16" in capsys.readouterr().out
    model = quantized_models.random_model(quantized_models.random_config("small", 2), seed=0)
    tokens = torch.tensor([[*b"word1 word2 word3"]])
    before = model(input_ids=tokens, labels=tokens).loss
    adapted = PeftModel.from_pretrained(model, out / "adapters")
    assert adapted(input_ids=tokens, labels=tokens).loss < before - 1


def test_a_stopped_run_resumes_bit_for_bit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(text, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: signal.raise_signal(signal.SIGTERM))
        assert run(text, tmp_path / "halves") == 128 + signal.SIGTERM
    assert "Stopped and saved at step 2. To continue: finetune_quantized.py --resume" in capsys.readouterr().out
    assert losses(tmp_path / "halves") == whole[:2]
    assert not (tmp_path / "halves/adapters").exists()
    assert trained(text, tmp_path / "halves", "--resume") == whole
    assert "Resumed at step 2 of 4" in capsys.readouterr().out
    same = [(tmp_path / each / "adapters/adapter_model.safetensors").read_bytes() for each in ("whole", "halves")]
    assert same[0] == same[1]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    original = AdapterTraining.train_step

    def train_step(training: AdapterTraining) -> float:
        loss = original(training)
        if training.step == step:
            action()
        return loss

    monkeypatch.setattr(AdapterTraining, "train_step", train_step)


def test_expanded_experts_have_the_same_losses(text: Path, tmp_path: Path) -> None:
    """Losses are equal to the bit; a run with one kind of experts may be resumed with the other."""
    quantized = trained(text, tmp_path / "quantized")
    assert trained(text, tmp_path / "expanded", "--experts", "bfloat16") == quantized
    run(text, tmp_path / "both", "--steps", "3")
    chosen = options("--data", str(text), "--out", str(tmp_path / "both"), "--experts", "bfloat16", "--resume")
    assert finetune_quantized.run(chosen, []) == 0
    assert len(losses(tmp_path / "both")) == 4


def test_a_published_checkpoint_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """transformers expands the experts to bfloat16."""
    from transformers import GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    folder = published(tmp_path / "model")
    config = quantized_models.checkpoint_config(folder, None)
    model = quantized_models.published_model(config, folder)
    assert isinstance(model.model.layers[1].mlp.experts.down_proj, QuantizedWeight)
    expanded = Mxfp4Config(dequantize=True)
    theirs = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=expanded, experts_implementation="maxmoe"
    )
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs(tokens).logits)
    quantized_models.dequantize_experts(model)
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    assert quantized_models.checkpoint_config(folder, 1).num_hidden_layers == 1


SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "--checkpoint .*: it has no tensor model.norm.weight"),
        ({"lm_head.weight": torch.zeros(3, 128)}, r"lm_head.weight must have shape \(256, 128\), got \(3, 128\)"),
        ({SCALES: None}, "model.layers.1.*quantized as mxfp4: missing experts.down_proj_scales"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = published(tmp_path / "model", **changes)
    with pytest.raises(InputError, match=message):
        quantized_models.published_model(quantized_models.checkpoint_config(folder, None), folder)
