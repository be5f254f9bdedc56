"""Greedy generation: `Decoder.generate` beside transformers' `generate`, with the weights of one Mixtral model.

    python -m benchmarks.generation

Both keep keys and values. transformers runs its experts with "grouped_mm", and with "maxmoe". The tokens are compared;
the times are the best of some rounds in turn.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import maxmoe.integrations.transformers  # noqa: F401, registers the experts implementation "maxmoe"
from maxmoe import MoEConfig
from maxmoe.models import Decoder, DecoderConfig

SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_layers": 4, "num_heads": 4}
NUM_EXPERTS, TOP_K, WINDOW = 16, 2, 512


def decoder() -> Decoder:
    """Return the model of this library."""
    V, D, F, L, H = SIZES.values()
    moe = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=NUM_EXPERTS, top_k=TOP_K)
    config = DecoderConfig(
        vocab_size=V, hidden_size=D, num_layers=L, num_heads=H, moe=moe, max_sequence_length=WINDOW, norm_eps=1e-6
    )
    return Decoder(config).eval()


def mixtral(model: Decoder, implementation: str) -> Any:
    """Return the same model of transformers."""
    V, D, F, L, H = SIZES.values()
    config = MixtralConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=H,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=WINDOW,
        rms_norm_eps=1e-6,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        experts_implementation=implementation,
    )
    other: Any = MixtralForCausalLM(config).eval()
    other.load_state_dict(weights_of_mixtral(model, other.state_dict().keys()))
    return other


def weights_of_mixtral(model: Decoder, names: Any) -> dict[str, Tensor]:
    """Return the weights under the names of transformers."""
    state = model.state_dict()
    found = {"model.embed_tokens.weight": state["embedding.weight"], "model.norm.weight": state["norm.weight"]}
    found["lm_head.weight"] = state["output.weight"]
    for layer in range(SIZES["num_layers"]):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for projection in "qkvo":
            name = f"{projection}_proj.weight"
            found[f"{theirs}self_attn.{name}"] = state[f"{ours}attention.{name}"]
        found[f"{theirs}input_layernorm.weight"] = state[f"{ours}attention_norm.weight"]
        found[f"{theirs}post_attention_layernorm.weight"] = state[f"{ours}feed_forward_norm.weight"]
        gate, up, down = (state[f"{ours}feed_forward.experts.{name}_proj"] for name in ("gate", "up", "down"))
        block = next(name for name in names if name.startswith(theirs) and name.endswith("gate.weight"))
        block = block.removesuffix("gate.weight")
        found[f"{block}gate.weight"] = state[f"{ours}feed_forward.router.weight"]
        found[f"{block}experts.gate_up_proj"] = torch.cat((gate.mT, up.mT), dim=1)
        found[f"{block}experts.down_proj"] = down.mT.contiguous()
    return found


def main() -> None:
    """Compare the tokens and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--num-tokens", type=int, default=64, help="tokens to generate")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = decoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)  # so that greedy tokens have no near ties
    prompt = torch.randint(SIZES["vocab_size"], (1, options.prompt))
    ways: dict[str, Callable[[], Tensor]] = {
        "Decoder.generate": lambda: model.generate(prompt, options.num_tokens, temperature=0)
    }
    for implementation in ("maxmoe", "grouped_mm"):
        other = mixtral(model, implementation)
        ways[f"transformers, {implementation}"] = lambda other=other: other.generate(  # type: ignore[misc]
            prompt, min_new_tokens=options.num_tokens, max_new_tokens=options.num_tokens, do_sample=False
        )
    expected = ways["Decoder.generate"]()
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = way()
            best[name] = min(best[name], time.perf_counter() - start)
            same = int((tokens == expected).sum()) - options.prompt
            if same < options.num_tokens:
                print(f"{name}: {same} of {options.num_tokens} tokens are the same")
    for name, seconds in best.items():
        ratio = seconds / best["Decoder.generate"]
        print(f"{name:28} {seconds / options.num_tokens * 1e3:8.3f} ms per token, {ratio:.2f} of Decoder.generate")


if __name__ == "__main__":
    main()
