"""The picture of docs/how_to/lora.md: adapters trained by the Trainer of transformers, with three implementations.

python docs/adapter_pictures.py   # trains for a minute, prints the differences, writes docs/how_to/lora_losses.png
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig, Trainer, TrainingArguments

import maxmoe.integrations.transformers as _integration  # noqa: F401  # registers "maxmoe"

PICTURE = Path(__file__).parent / "how_to" / "lora_losses.png"
IMPLEMENTATIONS = {"eager": "#f0b27a", "grouped_mm": "#b5541c", "maxmoe": "#1b6ca8"}
STEPS, BATCH, LENGTH, LETTERS = 200, 8, 64, 27
SIZES = {
    "vocab_size": LETTERS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "Qwen3-MoE": Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4
    ),
    "gpt-oss": GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=16, num_experts_per_tok=4, sliding_window=32
    ),
}
ADAPTERS = {
    "r": 8,
    "lora_alpha": 16,
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "target_modules": ["q_proj", "v_proj"],
}


def corpus() -> Tensor:
    """Random words of random letters, ``(N, LENGTH)`` int64; 0 is the space."""
    generator = torch.Generator().manual_seed(0)
    words = [
        [0, *torch.randint(1, LETTERS, (int(torch.randint(2, 7, (), generator=generator)),), generator=generator)]
        for _ in range(100)
    ]
    count = STEPS * BATCH * LENGTH
    order = torch.randint(len(words), (count,), generator=generator).tolist()
    letters = torch.tensor([int(letter) for word in order for letter in words[word]][:count])
    return letters.view(-1, LENGTH)


def base_model(family: str, implementation: str) -> Any:
    """A model with the same random parameters for every implementation of its experts."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family], experts_implementation=implementation)


def train(family: str, implementation: str, folder: Path) -> list[float]:
    """Train adapters on a frozen model and save them; return the loss of each step."""
    model = base_model(family, implementation)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**ADAPTERS))
    options = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(adapted, options, train_dataset=[{"input_ids": row, "labels": row} for row in corpus()])
    trainer.train()
    adapted.save_pretrained(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def logits(family: str, implementation: str, folder: Path) -> Tensor:
    """The logits of a model with saved adapters."""
    model = PeftModel.from_pretrained(base_model(family, implementation), folder).eval()
    result: Tensor = model(input_ids=corpus()[:BATCH]).logits
    return result


def differences(one: list[float], other: list[float]) -> list[float]:
    """How far two runs are apart in each step."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def picture(losses: dict[str, dict[str, list[float]]]) -> Figure:
    """Draw the losses of eager and maxmoe, and how far the others are from eager, for each family."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, len(losses), squeeze=False, height_ratios=(3, 2), sharex=True, sharey="row")
    for (curves, apart), (family, runs) in zip(panels.T, losses.items(), strict=True):
        steps = range(1, len(runs["eager"]) + 1)
        for name, width in (("eager", 5), ("maxmoe", 1.2)):
            curves.plot(steps, runs[name], color=IMPLEMENTATIONS[name], linewidth=width, label=name)
        curves.set(title=f"{family}: loss of adapters on frozen weights")
        for name in ("grouped_mm", "maxmoe"):
            apart.plot(steps, differences(runs[name], runs["eager"]), ".", color=IMPLEMENTATIONS[name], label=name)
        apart.margins(y=0.3)
        apart.set_ylim(bottom=0)
        apart.set(title="difference from the loss with eager", xlabel="step")
        for axes in (curves, apart):
            axes.legend(frameon=False, loc="upper right", ncols=2)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("nats per letter")
    return figure


def main() -> None:
    """Train both families with all implementations, print the differences, and write the picture."""
    torch.set_num_threads(1)  # the products are small
    losses: dict[str, dict[str, list[float]]] = {}
    for family in CONFIGS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            losses[family] = {way: train(family, way, folder / way) for way in IMPLEMENTATIONS}
            got, expected = (logits(family, way, folder / "maxmoe") for way in ("maxmoe", "eager"))
        runs = losses[family]
        apart = {way: max(differences(runs[way], runs["eager"])) for way in ("grouped_mm", "maxmoe")}
        print(
            f"{family}: loss {runs['eager'][0]:.4f} to {runs['eager'][-1]:.4f} (eager), {runs['maxmoe'][-1]:.4f} "
            f"(maxmoe). Largest difference of a loss from eager: {apart['grouped_mm']:.1e} (grouped_mm), "
            f"{apart['maxmoe']:.1e} (maxmoe). Adapters of maxmoe in an eager model: largest difference of a logit "
            f"{float((got - expected).abs().max()):.1e}, largest logit "
            f"{float(expected.abs().max()):.1f}"
        )
    picture(losses).savefig(PICTURE, dpi=100)


if __name__ == "__main__":
    main()
