"""Replaces the blocks of random small models of transformers, and compares a step and saved files with their own code.

    python tests/fuzz/fuzz_replaced_blocks.py --seconds 3600 --seed 1
    python tests/fuzz/fuzz_replaced_blocks.py --seed 1 --case 4711

Family, sizes, masks, batch, dtype, gradient checkpointing, router logits and the saved model are random. Logits of
tokens that are not padding, losses and gradients equal the code of the family; files hold the same bits.
"""

import copy
import os
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.utils import logging  # noqa: E402

from fuzz import loop  # noqa: E402
from maxmoe import StatsAccumulator  # noqa: E402
from maxmoe.integrations.transformers import replace_moe_blocks  # noqa: E402
from support.replaced_models import PRESETS, assert_same, enable_checkpointing, small_model, step  # noqa: E402
from support.small_models import RENAMED_ELSEWHERE, REPLACED_ONLY  # noqa: E402

logging.disable_progress_bar()
logging.set_verbosity_error()
# In float32 a token may get one other expert: its two best scores are equal but for rounding.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
WIDTHS = ("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size")


def one_case(random: Random) -> str:
    """Compare one model; return its dtype and the kind of comparison."""
    # JetMoE has no activation checkpointing, Switch Transformers drops tokens.
    preset = random.choice([preset for preset in PRESETS if preset not in REPLACED_ONLY])
    dtype = random.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    eager = random_model(random, preset).to(dtype)
    ours = copy.deepcopy(eager)
    count = len(replace_moe_blocks(ours, correction_bias_update_rate=0.0))
    assert count == eager.config.get_text_config().num_hidden_layers // (2 if preset == "longcat_flash" else 1), count
    ids, mask = random_batch(random)
    check_step(random, eager, ours, ids, mask)
    with tempfile.TemporaryDirectory() as folder:
        check_files(random, eager, ours, Path(folder), preset not in RENAMED_ELSEWHERE)
    return str(dtype).removeprefix("torch.")


def random_model(random: Random, preset: str) -> Any:
    """A model with random sizes; often with F = D, where a transposed matrix has the same shape."""
    width = random.choice([16, 16, 3, 10])
    sizes = dict.fromkeys(WIDTHS, width)
    if preset in ("qwen2_moe", "qwen3_next", "kolibri1", "laguna"):
        sizes["shared_expert_intermediate_size"] = width * random.choice([1, 2])
    if preset == "step3p7":
        sizes["share_expert_dim"] = width * random.choice([1, 2])
    if preset == "nemotron_h":
        sizes["moe_shared_expert_intermediate_size"] = width
        sizes["moe_latent_size"] = random.choice([None, 6, 16])
    if preset in ("deepseek_v3", "glm4_moe"):
        sizes["first_k_dense_replace"] = 0
    model = small_model(preset, num_hidden_layers=random.choice([1, 2]), router_aux_loss_coef=0.1, **sizes)
    torch.manual_seed(random.randrange(2**32))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train(random.random() < 0.7)


def random_batch(random: Random) -> tuple[Tensor, Tensor | None]:
    """Tokens, and a mask with padding on a side or anywhere; each sequence has a token at least."""
    batch, length = random.choice([1, 2, 3, 4]), random.choice([1, 2, 5, 9])
    ids = torch.randint(3, 32, (batch, length))
    kind = random.choice(["none", "ones", "left", "right", "anywhere"])
    if kind == "none":
        return ids, None
    mask = torch.ones_like(ids)
    for row in range(batch):
        padding = 0 if kind == "ones" else random.randrange(length)
        places = {"left": range(padding), "right": range(length - padding, length)}
        for place in places.get(kind, random.sample(range(1, length), min(padding, length - 1))):
            mask[row, place] = 0
    return ids, mask


def check_step(random: Random, eager: Any, ours: Any, ids: Tensor, mask: Tensor | None) -> None:
    options = {"output_router_logits": random.random() < 0.5}
    accumulator = StatsAccumulator(ours)
    if random.random() < 0.5:
        use_reentrant = random.random() < 0.5  # through which router logits have no gradient
        for model in (eager, ours):
            enable_checkpointing(model, use_reentrant=use_reentrant)
    expected = step(eager, ids, mask, **options)
    got = step(ours, ids, mask, **options)
    if not expected["loss"].isfinite():  # no token is a target
        return
    if next(ours.parameters()).dtype == torch.bfloat16:  # in which equal scores are frequent
        assert all(value.isfinite().all() for value in got.values())
    else:
        assert_same(got, expected, mask, TOLERANCE[next(eager.parameters()).dtype])
        num_tokens = ids.numel() if mask is None else int(mask.sum())
        for layer, stats in zip(ours_layers(ours), accumulator.update().layers.values(), strict=True):
            assert stats.tokens_per_expert.sum() == num_tokens * layer.config.top_k


def ours_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "routed_experts")]


def check_files(random: Random, eager: Any, ours: Any, folder: Path, has_own_names: bool) -> None:
    """Both models write the same files, which `from_pretrained` reads; `load_state_dict` too if all names match."""
    options = {"max_shard_size": random.choice(["5GB", "20KB"]), "save_original_format": random.random() < 0.7}
    for name, model in (("eager", eager), ("ours", ours)):
        model.save_pretrained(folder / name, **options)
    files = {path.name for path in (folder / "eager").iterdir()}
    assert files == {path.name for path in (folder / "ours").iterdir()}
    shards = [load_file(folder / "ours" / name) for name in sorted(files) if name.endswith(".safetensors")]
    for name in files:
        if name.endswith(".safetensors"):
            assert (folder / "eager" / name).read_bytes() == (folder / "ours" / name).read_bytes(), name
    read = type(eager).from_pretrained(folder / "ours", dtype=next(eager.parameters()).dtype)
    check_state(read.state_dict(), eager.state_dict())
    if has_own_names:
        for parameter in ours.parameters():
            parameter.data.zero_()
        for shard in shards:
            ours.load_state_dict(
                shard, strict=len(shards) == 1 and not getattr(ours.config, "tie_word_embeddings", False)
            )
        check_state(ours.state_dict(), eager.state_dict())


def check_state(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        narrow = min(got[name].dtype, value.dtype, key=lambda dtype: dtype.itemsize)  # some are read in float32
        assert torch.equal(got[name].to(narrow), value.to(narrow)), name


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.exit(loop.main(one_case, __doc__))
