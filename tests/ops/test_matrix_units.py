"""Products on matrix units (AMX) in a whole layer, in the emulation that runs on every processor."""

import os
from pathlib import Path

import pytest

import maxmoe
from support import programs

# Prints a hash of outputs and gradients of a layer whose sizes fill no tile, with few and with many rows for an expert.
CODE = """
import copy, hashlib
import torch
import maxmoe

torch.manual_seed(0)
sizes = {"hidden_size": 65, "intermediate_size": 33, "num_experts": 5, "top_k": 2}
layer = maxmoe.MoE(maxmoe.MoEConfig(**sizes, expert_bias=True)).bfloat16()
exact = copy.deepcopy(layer).double()
x = torch.randn(2, 40, 65).bfloat16()
with torch.no_grad():
    layer.router.weight[0] += 0.3 * x.mean((0, 1))
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})

def run(layer, x):
    x = x.detach().clone().requires_grad_()
    out = layer(x).hidden_states
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.experts.parameters()])]

hashes = set()
for threads in (1, 2):
    torch.set_num_threads(threads)
    results = run(layer, x)
    hashes.add(hashlib.sha256(b"".join(each.view(torch.int16).numpy().tobytes() for each in results)).hexdigest())
for got, expected in zip(results, run(exact, x.double()), strict=True):
    assert (got.double() - expected).norm() < 0.02 * expected.norm()
print(*hashes, maxmoe.build_info()["isa"])
"""


def layer_on(isa: str) -> list[str]:
    """Return the hashes of the results with 1 and 2 threads, once if they are equal, and the instruction set in use."""
    done = programs.python(CODE, cwd=Path(__file__).parents[1], env=os.environ | {"MAXMOE_ISA": isa})
    return programs.printed(done).split()


def test_a_layer_in_the_emulation() -> None:
    """One hash for any number of threads, the same as of tiles where the processor has them."""
    of_emulation, isa = layer_on("amx_emulated")
    assert isa == "amx_emulated"
    if "amx" in maxmoe.build_info()["supported_isas"]:
        assert layer_on("amx") == [of_emulation, "amx"]


@pytest.mark.skipif("amx" not in maxmoe.build_info()["supported_isas"], reason="this processor has no tiles")
def test_vectors_where_the_system_refuses_tiles() -> None:
    """Linux refuses them to a process with a signal stack that cannot hold them; the first product would be SIGILL."""
    code = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0

import torch
import maxmoe

rows = maxmoe.ops.gmm(torch.ones(40, 64).bfloat16(), torch.ones(1, 64, 64).bfloat16(), torch.tensor([40]))
assert rows.eq(64).all()
print(maxmoe.build_info()["isa"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "MAXMOE_ISA"}
    assert programs.printed(programs.python(code, env=environment)).strip() not in ("amx", "amx_emulated")
