"""Tokens that a Decoder generates, and errors of wrong calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.small_decoder import MOE, make, tokens_like

UNCACHED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "within_the_window": ({}, [3, 1, 1, 1, 1, 1]),
    "beyond_the_window": ({"max_sequence_length": 5}, [3, 1, 1, 5, 5, 5]),
    "prompt_longer_than_the_window": ({"max_sequence_length": 2}, [2, 2, 2, 2, 2, 2]),
    "one_key_value_head": ({"num_key_value_heads": 1}, [3, 1, 1, 1, 1, 1]),
    "no_dense_block": ({"num_dense_layers": 0}, [3, 1, 1, 1, 1, 1]),
    "capacity": ({"moe": replace(MOE, implementation="dense", capacity_factor=1.0)}, [3, 4, 5, 6, 7, 8]),
    "buffer": ({"moe": replace(MOE, buffer_factor=1.0)}, [3, 4, 5, 6, 7, 8]),
    "buffer in chunks": ({"moe": replace(MOE, buffer_factor=0.5, overflow="chunks")}, [3, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize(("changes", "lengths"), UNCACHED.values(), ids=UNCACHED)
def test_logits_are_those_of_all_tokens_of_the_window(changes: dict[str, Any], lengths: list[int]) -> None:
    model = make(**changes)
    window, calls = model.config.max_sequence_length, []
    hook = model.register_forward_hook(lambda _, arguments, output: calls.append((arguments[0], output.logits[:, -1])))
    tokens = model.generate(tokens_like(model, 3, 3), 6, temperature=0)
    hook.remove()
    assert [arguments.shape[1] for arguments, _ in calls] == lengths
    for position, (_, logits) in enumerate(calls, start=3):
        expected = model(tokens[:, :position][:, -window:]).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(tokens[:, position], expected.argmax(-1))
    assert torch.equal(model.generate(tokens[:, :3], 6, top_k=1), tokens)


def graphs_since(counted: list[int]) -> int:
    """The number of graphs that have run since the last call."""
    number, counted[:] = len(counted), []
    return number


# A warning of torch that is hidden unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["model", "blocks"])
def test_a_compiled_model_trains_with_compiled_code_afterwards(is_whole: bool) -> None:
    """torch.compile compiles a module for at most eight kinds of arguments."""
    torch._dynamo.reset()
    model, counted = make(num_layers=1, num_dense_layers=0), list[int]()

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            counted.append(0)
            return graph(*inputs)

        return run

    prompt, tokens = tokens_like(model, 2, 3), tokens_like(model)
    expected = model.generate(prompt, 12, temperature=0)
    modules = [model] if is_whole else list(model.blocks)
    for module in modules:
        module.compile(backend=backend)
    for length in (7, 5):  # compiled before and after a generation
        assert torch.equal(model.generate(prompt, 12, temperature=0), expected)
        assert graphs_since(counted) == 0
        output = model(tokens[:, :length])
        (output.logits.sum() + output.aux_loss).backward()
        assert graphs_since(counted) == len(modules)


def test_sampled_frequencies_follow_the_logits() -> None:
    model = make()
    tokens = torch.tensor([[3, 1, 4]])
    logits = model(tokens).logits[0, -1]
    drawn = model.generate(tokens.expand(4000, 3), 1, temperature=0.3, top_k=3)[:, -1]
    kept = logits.topk(3).indices
    expected = torch.zeros(11, dtype=logits.dtype)
    expected[kept] = (logits[kept] / 0.3).softmax(-1)
    torch.testing.assert_close(torch.bincount(drawn, minlength=11) / 4000, expected.float(), rtol=0, atol=0.03)


def test_wrong_calls_say_what_they_got() -> None:
    model = make()
    with pytest.raises(ValueError, match="tokens must have at most 16 positions, got 17"):
        model(tokens_like(model, sequence=17))
    with pytest.raises(ValueError, match=r"need tokens and temperature >= 0, got \[1, 0\], 1\.0"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"got \[1, 2\], -1"):
        model.generate(torch.zeros(1, 2, dtype=torch.int64), 1, temperature=-1)
