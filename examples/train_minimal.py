"""Train a small Mixture-of-Experts language model on text: a script to copy and change.

In one process: python examples/train_minimal.py
In two, each with half of the experts: torchrun --nproc-per-node 2 examples/train_minimal.py
"""

import os
import sysconfig
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported: docs/how_to/busy_machine.md

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import maxmoe
from maxmoe.parallel import token_group, token_sharding
from maxmoe.sharding import Mesh

STEPS, STEPS_PER_LINE, BATCH, LENGTH, WIDTH = 400, 50, 16, 128, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_experts": 16, "top_k": 2}
        self.moe = maxmoe.MoEFeedForward(maxmoe.MoEConfig(**sizes, load_balance_loss_weight=0.01))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block(), nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions(torch.arange(LENGTH))))


def main() -> None:
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))  # or your own text
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    model, part, group = LanguageModel(), ..., maxmoe.nn.LocalTokens()

    if dist.is_torchelastic_launched():  # started by torchrun
        dist.init_process_group("gloo")
        mesh, rules = Mesh({"expert": -1}), "ep-as-dp"
        maxmoe.parallelize(model, mesh, rules)
        part, group = token_sharding(mesh, rules).slices((BATCH, LENGTH)), token_group(mesh, rules)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    accumulator = maxmoe.StatsAccumulator(model)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))  # equal on all ranks; each computes a part
        batch = text[starts + torch.arange(LENGTH + 1)].long()
        logits, targets = model(batch[:, :-1][part]), batch[:, 1:][part]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        loss = maxmoe.mean_over_tokens(losses, tokens=group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        load = max(layer.load_max_over_mean.item() for layer in accumulator.update().layers.values())
        if step % STEPS_PER_LINE == 0 and int(os.environ.get("RANK", 0)) == 0:
            print(f"step {step}: loss {loss.item():.3f}, busiest expert {load:.2f} x the mean")


if __name__ == "__main__":
    main()
