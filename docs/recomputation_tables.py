"""The tables of docs/recomputation.md: what a layer keeps under each policy, the peak of a step and its time.

python docs/recomputation_tables.py   # prints the tables; one process for each policy
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import maxmoe
from maxmoe import MoEConfig
from maxmoe.costs import estimate
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh

ROOT = Path(__file__).parent.parent
POLICIES = [
    (),
    ("norms",),
    ("attention",),
    ("shared_experts",),
    ("experts",),
    ("dispatch",),
    ("experts", "dispatch"),
    ("attention", "dispatch", "experts", "norms", "shared_experts"),
    ("blocks",),
]
MOE = MoEConfig(hidden_size=512, intermediate_size=256, num_experts=16, top_k=4, num_shared_experts=1)
CONFIG = DecoderConfig(vocab_size=1024, hidden_size=512, num_layers=4, num_heads=8, moe=MOE, max_sequence_length=512)
BATCH, LENGTH = 2, 512
RANKS = 4
WAYS: dict[str, tuple[dict[str, int], Dispatch]] = {
    "one process": ({}, "auto"),
    "ring of experts": ({"expert": RANKS}, "ring_of_experts"),
    "ragged all-to-all": ({"expert": RANKS}, "ragged_all_to_all"),
}
STEPS = 3


def label(policy: tuple[str, ...]) -> str:
    """The names in a cell of a table."""
    return ", ".join(policy) or "(none)"


def kept_per_token(policy: tuple[str, ...], sizes: dict[str, int], dispatch: Dispatch) -> float:
    """KiB that one layer keeps of a token of the rank."""

    def activations(num_layers: int) -> int:
        config = replace(CONFIG, num_layers=num_layers, recompute=policy)
        model = Decoder(config, device="meta", dtype=torch.bfloat16)
        step = {"batch_size": BATCH * RANKS, "sequence_length": LENGTH}
        return estimate(model, Mesh.planned(sizes), "ep-as-dp", dispatch=dispatch, **step).memory["activations"]

    tokens = BATCH * LENGTH * (1 if sizes else RANKS)
    return (activations(2) - activations(1)) / tokens / 1024


def kept() -> str:
    """The bytes that each policy keeps."""
    lines = [f"| `recompute` | {' | '.join(WAYS)} |", f"|---|{'---:|' * len(WAYS)}"]
    for policy in POLICIES:
        cells = [f"{kept_per_token(policy, *way):.1f}" for way in WAYS.values()]
        lines.append(f"| {label(policy)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def step(model: Decoder, tokens: Tensor) -> None:
    """Run forward and backward."""
    output = model(tokens)
    (cross_entropy(output.logits.flatten(0, 1).float(), tokens.flatten()) + output.aux_loss).backward()


def measure(policy: tuple[str, ...]) -> None:
    """Print the peak of a step above what lies there before it, gradients included, and its time."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.peak import settle, status

    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, recompute=policy), dtype=torch.bfloat16)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH))
    step(model, tokens)  # code, threads and gradients are there
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step(model, tokens)
        seconds.append(time.perf_counter() - begin)
    maxmoe.empty_cache()
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    before = status("RssAnon")
    step(model, tokens)
    above = status("VmHWM") - status("RssFile") - status("RssShmem") - before
    print(above, median(seconds))


def measured() -> Iterator[str]:
    """The lines of the table of peaks and times."""
    yield "| `recompute` | peak, MiB | step, ms |"
    yield "|---|---:|---:|"
    for policy in POLICIES:
        # The peak with an allocator that returns what is freed, which takes time.
        returns_all = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, "measure", *policy]
        (above, _), (_, seconds) = (
            map(float, subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split())
            for env in (os.environ | returns_all, dict(os.environ))
        )
        yield f"| {label(policy)} | {above / 2**20:.0f} | {seconds * 1000:.0f} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(tuple(sys.argv[2:]))
    else:
        print(kept(), *measured(), sep="\n")
