"""Published training speeds beside the ranking of `maxmoe.costs`, as the table of docs/costs.md.

    python -m benchmarks.published_steps

Assumed if a source does not state them: 4096 tokens per sequence, bfloat16, the least recomputation that fits, and 1F1B
with one stage per rank.
"""

import math
from dataclasses import dataclass

import torch

from maxmoe import MoEConfig, set_recompute
from maxmoe.costs import Device, Link, estimate
from maxmoe.costs.search import recompute_choices
from maxmoe.costs.step_time import step_time
from maxmoe.families.family import PublishedModel, published_models
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import Mesh

LENGTH = 4096
DEEPSEEK_V3 = (
    "DeepSeek-V3, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437) (180K H800 hours per 10^12 tokens, FP8)"
)
MEGATRON = "[Megatron Bridge](https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html) 25.11"
MAXTEXT = "[MaxText](https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html), BF16"
TORCHTITAN = "[torchtitan #1789](https://github.com/pytorch/torchtitan/issues/1789), BF16"
PUBLISHED = published_models()
DEEPSEEK_V3_16B = PublishedModel(
    "DeepSeek-V3 16B",
    layers=27,
    heads=(16,),
    vocab_size=102400,
    dense=(1, 10944),
    layer=lambda: MoEConfig(
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=64,
        top_k=6,
        num_shared_experts=2,
        score_function="sigmoid",
    ),
)

# A node is a slice, whose chips are connected by a torus: an axis of the mesh has the two links of one of three dims.
V5P = Device(
    name="v5p",
    sources=["https://cloud.google.com/tpu/docs/v5p; max_share, latencies, overlap: assumed"],
    peak_flops={"bfloat16": 459e12},
    max_share=0.8,
    memory=95_000_000_000,
    memory_bandwidth=2.765e12,
    ranks_per_node=8960,
    intra_node=Link(latency=1e-6, bandwidth=200e9),
    inter_node=Link(latency=10e-6, bandwidth=6.25e9),
    overlap=0.9,
)


@dataclass(frozen=True)
class Published:
    """A published training speed, and the plan that is compared with it.

    Attributes:
        source: name of the publication.
        model: sizes of the model.
        device: the device, or its name.
        mesh: size of each axis.
        batch_size: number of sequences of a step.
        tokens: published tokens per second of a device.
        num_micro_batches: number of micro-batches, with stages.
        device_name: device of the source, if another file is used for it.
    """

    source: str
    model: PublishedModel
    device: str | Device
    mesh: dict[str, int]
    batch_size: int
    tokens: float
    num_micro_batches: int = 1
    device_name: str = ""

    def measure(self) -> tuple[float, tuple[str, ...], int]:
        """Return the seconds of a step with the rules `ep-as-dp`, the least recomputation that fits, and its memory."""
        device, mesh = Device.load(self.device), Mesh.planned(self.mesh)
        config = DecoderConfig.of_published(self.model, max_sequence_length=LENGTH)
        model = Decoder(config, device="meta", dtype=torch.bfloat16)
        many = self.num_micro_batches if "stage" in self.mesh else None
        for recompute in recompute_choices(model):
            set_recompute(model, recompute)
            step = {"batch_size": self.batch_size, "sequence_length": LENGTH, "num_micro_batches": many}
            costs = estimate(model, mesh, "ep-as-dp", allow_unused=True, **step)
            memory = max(rank.total for rank in costs.ranks)
            if memory <= device.memory:
                break
        time = step_time(costs.ranks, self.num_micro_batches, device.peak(torch.bfloat16), mesh, device)
        return time.seconds, recompute, memory

    def row(self) -> str:
        """A row of the table."""
        seconds, recompute, memory = self.measure()
        num_ranks = math.prod(self.mesh.values())
        found = self.batch_size * LENGTH / seconds / num_ranks
        layout = [f"{size} stages" if axis == "stage" else f"{axis}={size}" for axis, size in self.mesh.items()]
        layout += [f"{self.num_micro_batches} micro-batches"] if self.num_micro_batches > 1 else []
        layout += [f"recomputed: {' '.join(recompute)}"] if recompute else []
        if memory > (limit := Device.load(self.device).memory):
            layout.append(f"needs {memory / limit:.1f} times the memory")
        cells = (
            self.source,
            f"{self.model.name}, {num_ranks} {self.device_name or str(self.device).upper()}",
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
    Published(MAXTEXT, PUBLISHED["mixtral"], V5P, {"fsdp": 256}, 2048, 2909, device_name="v5p"),
    Published(TORCHTITAN, DEEPSEEK_V3_16B, "h100", {"expert": 8}, 32, 11758),
)


def main() -> None:
    """Print the table."""
    print("| source | model, device | layout | published | ranking | error |\n|---|---|---|---|---|---|")
    for row in ROWS:
        print(row.row(), flush=True)


if __name__ == "__main__":
    main()
