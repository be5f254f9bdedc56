"""The table of docs/optimizers.md for meshes that do not exist: what Muon sends in a step of DeepSeek-V3.

python docs/optimizer_tables.py   # prints the table
"""

import torch

from maxmoe.costs import estimate
from maxmoe.families.family import published_models
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import Mesh
from maxmoe.text_table import readable_bytes

BATCH, LENGTH = 256, 4096
LAYOUTS = [
    ("shard-exp-on-fsdp", {"fsdp": 256}),
    ("shard-exp-on-fsdp", {"fsdp": 16, "expert": 16}),
    ("ep-as-dp", {"expert": 256}),
]


def traffic() -> str:
    """Write the collectives of Muon and their bytes beside the bytes of the whole step, in Markdown."""
    lines = [
        "| rules | mesh | collectives of Muon | sent by Muon | sent in a step | state of Muon |",
        "|---|---|---:|---:|---:|---:|",
    ]
    config = DecoderConfig.of_published(published_models()["deepseek_v3"], max_sequence_length=LENGTH)
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    for rules, sizes in LAYOUTS:
        mesh = Mesh.planned(sizes)
        costs = estimate(model, mesh, rules, optimizer="muon", batch_size=BATCH, sequence_length=LENGTH)
        of_muon = [row for row in costs.traffic if "Muon" in row.purpose]
        cells = (
            rules,
            ", ".join(f"{axis}={size}" for axis, size in sizes.items()),
            str(sum(row.times for row in of_muon)),
            readable_bytes(sum(row.bytes for row in of_muon)),
            readable_bytes(sum(row.bytes for row in costs.traffic)),
            readable_bytes(costs.memory["state of muon"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(traffic())
