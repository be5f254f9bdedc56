"""Published training speeds beside predicted ones, as the tables of docs/planning.md.

    python -m benchmarks.published_steps

Assumed if a source does not state them: 4096 tokens per sequence, bfloat16, the least recomputation that fits, the best
number of chunks, and 1F1B with one stage per rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from maxmoe import MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.planning import Device, PredictedPlan, predict
from maxmoe.planning.search import CHUNKS, RECOMPUTE
from maxmoe.presets.published import PUBLISHED, PublishedModel
from maxmoe.sharding import Mesh

LENGTH = 4096
DEEPSEEK_V3 = (
    "DeepSeek-V3, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437) (180K H800 hours per 10^12 tokens, FP8)"
)
MEGATRON = "[Megatron Bridge](https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html) 25.11"
MAXTEXT = "[MaxText](https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html), BF16"
TORCHTITAN = "[torchtitan #1789](https://github.com/pytorch/torchtitan/issues/1789), BF16"
DEEPSEEK_V3_16B = PublishedModel(
    name="DeepSeek-V3 16B",
    layer=lambda: MoEConfig(
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=64,
        top_k=6,
        num_shared_experts=2,
        score_function="sigmoid",
    ),
    sizes={
        "num_layers": 27,
        "num_heads": 16,
        "head_dim": 128,
        "vocab_size": 102400,
        "num_dense_layers": 1,
        "intermediate_size": 10944,
    },
)


@dataclass(frozen=True)
class Published:
    """A published training speed, and the plan that is compared with it.

    Attributes:
        source: name of the publication.
        model: sizes of the model.
        device: name of the device file.
        mesh: size of each axis.
        batch_size: number of sequences of a step.
        tokens: published tokens per second of a device.
        num_micro_batches: number of micro-batches, with stages.
        device_name: device of the source, if another file is used for it.
    """

    source: str
    model: PublishedModel
    device: str
    mesh: dict[str, int]
    batch_size: int
    tokens: float
    num_micro_batches: int = 1
    device_name: str = ""

    def predict(self, device: Device | None = None, **sizes: int) -> PredictedPlan:
        """Predict the step with the rules `ep-as-dp`, with the least recomputation that fits and the best chunks."""
        device = device or Device.load(self.device)
        config = DecoderConfig.of_published(self.model, max_sequence_length=LENGTH, **sizes)
        model = Decoder(config, device="meta", dtype=torch.bfloat16)
        step = {"batch_size": self.batch_size, "sequence_length": LENGTH, "num_micro_batches": self.num_micro_batches}
        predicted = partial(predict, model, Mesh.planned(self.mesh), "ep-as-dp", device, **step)
        fitting = (names for names in RECOMPUTE if predicted(recompute=names).memory <= device.memory)
        recompute = next(fitting, RECOMPUTE[-1])
        plans = (predicted(recompute=recompute, num_chunks=num_chunks) for num_chunks in CHUNKS)
        return min(plans, key=lambda plan: plan.seconds)

    def tokens_per_second(self, plan: PredictedPlan) -> float:
        """Predicted tokens per second of a device."""
        return self.batch_size * LENGTH / plan.seconds / math.prod(self.mesh.values())

    def row(self) -> str:
        """A row of the table."""
        plan, num_ranks = self.predict(), math.prod(self.mesh.values())
        found = self.tokens_per_second(plan)
        layout = [f"{size} stages" if axis == "stage" else f"{axis}={size}" for axis, size in self.mesh.items()]
        layout += [f"{self.num_micro_batches} micro-batches"] if self.num_micro_batches > 1 else []
        layout += [f"recomputed: {' '.join(plan.recompute)}"] if plan.recompute else []
        layout += [f"{plan.num_chunks} chunks"] if plan.num_chunks > 1 else []
        if plan.memory > (memory := Device.load(self.device).memory):
            layout.append(f"needs {plan.memory / memory:.1f} times the memory")
        where = f"{self.model.name}, {num_ranks} {self.device_name or self.device.upper()}"
        cells = (
            self.source,
            where,
            f"{', '.join(layout)}, batch {self.batch_size}",
            f"{self.tokens:.0f}",
            f"{found:.0f}",
            f"{found / self.tokens - 1:+.0%}".replace("%", " %"),
        )
        return f"| {' | '.join(cells)} |"


ROWS = (
    Published(
        DEEPSEEK_V3,
        PUBLISHED["deepseek_v3"],
        "h100",
        {"stage": 16, "fsdp": 2, "expert": 64},
        15360,
        1543,
        120,
        device_name="H800 (here h100)",
    ),
    Published(
        f"{MEGATRON}, FP8",
        PUBLISHED["deepseek_v3"],
        "b200",
        {"stage": 16, "fsdp": 2, "expert": 8},
        2048,
        2139,
        num_micro_batches=64,
    ),
    Published(f"{MEGATRON}, BF16", PUBLISHED["gpt_oss"], "h100", {"stage": 4, "fsdp": 2, "expert": 8}, 512, 5630, 16),
    Published(f"{MEGATRON}, BF16", PUBLISHED["gpt_oss"], "b200", {"fsdp": 8, "expert": 8}, 512, 8213),
    Published(f"{MEGATRON}, FP8", PUBLISHED["qwen3_moe"], "b200", {"stage": 8, "expert": 8}, 1024, 3269, 64),
    Published(MAXTEXT, PUBLISHED["mixtral"], "v5p", {"fsdp": 256}, 2048, 2909, device_name="v5p"),
    Published(TORCHTITAN, DEEPSEEK_V3_16B, "h100", {"expert": 8}, 32, 11758),
)


def deepseek_v3_step_by_step() -> Iterator[tuple[str, float]]:
    """Yield the prediction for DeepSeek-V3, then add the features of its authors' training one by one."""
    run, h100 = ROWS[0], Device.load("h100")
    yield "as planned here", run.tokens_per_second(run.predict())
    # 52 of 128 heads multiply as much as the projections of its latent attention.
    yield "the FLOPs of latent attention", run.tokens_per_second(run.predict(num_heads=52))
    fast = replace(h100, peak_flops={**h100.peak_flops, "bfloat16": 1979e12})
    yield "the peak of FP8", run.tokens_per_second(run.predict(fast, num_heads=52))
    links = {name: getattr(h100, name) for name in ("intra_node", "inter_node")}
    links = {name: replace(link, bandwidth=3 * link.bandwidth) for name, link in links.items()}
    text = "a dispatch of a third of the bytes: at most four nodes for each token, FP8"
    yield text, run.tokens_per_second(run.predict(replace(fast, **links), num_heads=52))


def main() -> None:
    """Print the tables."""
    print("| source | model, device | layout | published | predicted | error |\n|---|---|---|---|---|---|")
    for row in ROWS:
        print(row.row(), flush=True)
    print("\n| DeepSeek-V3 on 2048 H100 | tokens/s of a device |\n|---|---|")
    for text, tokens in deepseek_v3_step_by_step():
        print(f"| {text} | {tokens:.0f} |", flush=True)


if __name__ == "__main__":
    main()
