"""`python -m maxmoe adapters`: files of PEFT, and what `export_adapter` writes, converted into each other."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from maxmoe.adapters import share_outer_factors, wrappers_of
from maxmoe.cli.main import main
from maxmoe.convert.adapter_conversion import TARGETS
from maxmoe.integrations.transformers import export_adapter
from support.adapted import OTHER_RANKS, STACKS, WARNINGS, trained
from support.replaced_models import IDS, small_model

pytestmark = WARNINGS


def save(folder: Path, preset: str = "mixtral", targets: list[str] = STACKS, **options: Any) -> PeftModel:
    """Save an adapter that is not zero with PEFT in "peft", and the config of its model in "base"."""
    torch.manual_seed(3)
    settings = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": ["o_proj"]} | options
    model = small_model(preset).eval()
    model.config.save_pretrained(folder / "base")
    model = get_peft_model(model, LoraConfig(target_parameters=targets, **settings))
    model.save_pretrained(folder / "peft")
    return model


def convert(folder: Path, source: str, target: str, out: str | None = None) -> dict[str, Tensor]:
    """Convert the adapter in a folder; return the tensors of the new file."""
    paths = [str(folder / name) for name in (source, "base", out or target)]
    assert main(["adapters", paths[0], "--model", paths[1], "--to", target, "--out", paths[2]]) == 0
    return load_file(folder / (out or target) / "adapter_model.safetensors")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == each.dtype and found[name].equal(each) for name, each in expected.items())


def config_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return fields


@pytest.mark.parametrize(
    ("preset", "targets", "options"),
    [
        ("mixtral", ("vllm", "vllm-stacked", "sglang"), OTHER_RANKS),
        ("qwen3_moe", ("vllm",), {"use_rslora": True, "target_parameters": STACKS[1:]}),
        ("nemotron_h", ("vllm",), {"target_modules": ["shared_experts.up_proj"]}),
        ("gpt_oss", ("vllm-stacked",), {}),
    ],
)
def test_from_files_alone_as_from_the_model(
    preset: str, targets: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """The files of `export_adapter`, whose logits test_served_adapters.py compares."""
    names = options.pop("target_parameters", None) or (
        STACKS if preset != "nemotron_h" else ["experts.up_proj", STACKS[1]]
    )
    model = save(tmp_path, preset, names, **options)
    for target in targets:
        export_adapter(model, tmp_path / "exported", layout=TARGETS[target])  # type: ignore[arg-type]
        found = convert(tmp_path, "peft", target)
        assert_same(found, load_file(tmp_path / "exported/adapter_model.safetensors"))
        assert config_of(tmp_path / target) == config_of(tmp_path / "exported")


def test_round_trips_of_every_pair(tmp_path: Path) -> None:
    """All layouts hold these factors: of one rank and scale, with one outer factor for all experts."""
    model = save(tmp_path, r=4, lora_alpha=6, init_lora_weights=True)
    share_outer_factors(model)
    for factor in trained(model).values():
        nn.init.normal_(factor, std=0.3)
    model.save_pretrained(tmp_path / "peft")
    files = {target: convert(tmp_path, "peft", target, f"from peft/{target}") for target in TARGETS}
    for one, other in itertools.permutations(TARGETS, 2):
        assert_same(convert(tmp_path, f"from peft/{one}", other, "found"), files[other])
        if {"peft", "peft-0.18"} != {one, other}:  # which have the config of PEFT
            first = config_of(tmp_path / f"from peft/{other}")
            assert config_of(tmp_path / "found").items() >= {key: first[key] for key in ("r", "lora_alpha")}.items()
    for target in ("sglang", "vllm-shared", "vllm"):
        export_adapter(model, tmp_path / "exported", layout=TARGETS[target])  # type: ignore[arg-type]
        assert_same(load_file(tmp_path / "exported/adapter_model.safetensors"), files[target])
    outer = {
        "sglang": {"gate_up_proj.lora_A", "down_proj.lora_B"},
        "vllm-shared": {"w1.lora_A", "w3.lora_A", "w2.lora_B"},
    }
    for target, expected in outer.items():
        once = {name for name, each in files[target].items() if ".experts." in name and len(each) == 1}
        assert {name.split(".experts.")[1].removesuffix(".weight") for name in once} == expected
    loaded = PeftModel.from_pretrained(small_model("mixtral").eval(), tmp_path / "from peft/peft")
    torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("preset", ["qwen3_moe", "gpt_oss"])
def test_files_before_peft_0_19_1(preset: str, tmp_path: Path) -> None:
    """A had dim 1 of a parameter and B dim 2: einsum("o r e, e r i -> e i o"), whatever the matrices are."""
    model = save(tmp_path, preset, **OTHER_RANKS)
    found = convert(tmp_path, "peft", "peft-0.18")
    for path, wrapper in wrappers_of(model):
        a, b = (found[f"{path}.lora_{factor}.weight"] for factor in "AB")
        count = wrapper.num_experts
        a, b = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count)
        product = torch.einsum("o r e, e r i -> e i o", b, a) * wrapper.scaling["default"]
        torch.testing.assert_close(product, wrapper.get_delta_weight("default"), rtol=1e-13, atol=1e-13)
    assert config_of(tmp_path / "peft-0.18") == config_of(tmp_path / "peft")
    back = convert(tmp_path, "peft-0.18", "peft", "back")
    assert_same(back, load_file(tmp_path / "peft/adapter_model.safetensors"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None], name: str = "peft") -> None:
    """Change the tensors and the config of an adapter."""
    path, fields = folder / name / "adapter_model.safetensors", config_of(folder / name)
    tensors = load_file(path)
    change(tensors, fields)
    save_file({key: each.contiguous() for key, each in tensors.items()}, path)
    (folder / name / "adapter_config.json").write_text(json.dumps(fields))


def test_gate_and_up_with_factors_of_their_own(tmp_path: Path) -> None:
    """In one tensor they lie side by side, with twice the rank; apart they are as before."""
    save(tmp_path)
    convert(tmp_path, "peft", "vllm", "apart")

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name, each in tensors.items():
            tensors[name] = each.flip(1) if ".w3.lora_A" in name else each

    rewrite(tmp_path, change, "apart")
    files = {target: convert(tmp_path, "apart", target) for target in ("vllm", "peft", "vllm-stacked", "sglang")}
    assert config_of(tmp_path / "peft")["r"] == 4 and config_of(tmp_path / "sglang")["r"] == 2
    assert any(".experts.up_proj.lora_A" in name for name in files["sglang"])
    for target in ("peft", "vllm-stacked", "sglang"):
        assert_same(convert(tmp_path, target, "vllm", "back"), files["vllm"])
        assert config_of(tmp_path / "back") == config_of(tmp_path / "vllm")


def test_rounding_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two scales, 3 / 2 and 1 / 3, in bfloat16, and in float64 a quotient of 2."""
    save(tmp_path, alpha_pattern={"experts.down_proj": 1})
    rewrite(tmp_path, lambda tensors, _: tensors.update({key: each.bfloat16() for key, each in tensors.items()}))
    convert(tmp_path, "peft", "vllm")
    assert "rounded in base_model.model.model.layers.0.mlp.experts.down_proj" in capsys.readouterr().out
    rewrite(tmp_path, lambda _, fields: fields.update(alpha_pattern={"experts.down_proj": 6}))
    convert(tmp_path, "peft", "vllm")
    assert "No number was rounded." in capsys.readouterr().out


def test_order_of_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of B of each expert one after the other are found by their norms, and read so if the config says so."""
    count, rank, hidden, width = 32, 4, 6, 5
    norms = torch.randn(
        count, generator=torch.Generator().manual_seed(0)
    ).exp()  # of experts with more and fewer tokens
    tensors, sizes = {}, {".base_layer": (hidden, 2 * width), "": (width, hidden)}
    for level, (size_in, size_out) in sizes.items():
        name = f"base_model.model.model.layers.0.mlp.experts{level}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(count * rank, size_in)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size_out, rank, count).mul(norms).flatten(1)
    (tmp_path / "peft").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": hidden}))
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_parameters": STACKS}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "peft/adapter_model.safetensors")
    expected = convert(tmp_path, "peft", "vllm")

    def grouped(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name, each in tensors.items():
            tensors[name] = each.unflatten(1, (-1, count)).transpose(1, 2).flatten(1) if "lora_B" in name else each

    rewrite(tmp_path, grouped)
    command = ["adapters", *(str(tmp_path / name) for name in ("peft", "base", "other"))]
    command[2:2] = ["--to", "vllm", "--model"]
    assert main([*command[:-1], "--out", command[-1]]) == 2
    assert "if the columns of an expert follow each other: write" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    rewrite(tmp_path, lambda _, fields: fields.update(lora_B_layout="grouped_by_expert"))
    assert_same(convert(tmp_path, "peft", "vllm", "other"), expected)


def removed(end: str, tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    del tensors[next(name for name in tensors if name.endswith(end))]


Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
REFUSED: list[tuple[Change, str, str]] = [
    (
        lambda t, _: t.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}),
        "vllm",
        "vllm does not read base_model.model.lm_head.weight",
    ),
    (lambda _, c: c.update(init_lora_weights="olora"), "vllm", "init_lora_weights='olora' has changed the weights"),
    (
        lambda _, c: c.update(r=5),
        "vllm",
        "must have a rank that divides the 12 rows of A and the 12 columns of B into experts, got r=5",
    ),
    (
        lambda _, c: c.update(rank_pattern={"o_proj": 3}),
        "vllm",
        "o_proj must have factors (E, r, in) and (E, out, r) with r=3 of adapter_config.json, got (1, 2, 16)",
    ),
    (
        lambda *a: removed("o_proj.lora_A.weight", *a),
        "vllm",
        "o_proj.lora_B.weight must have its other factor beside it",
    ),
    (
        lambda t, _: t.update(
            {
                "base_model.model.visual.proj.lora_A.weight": torch.ones(2, 3),
                "base_model.model.visual.proj.lora_B.weight": torch.ones(3, 2),
            }
        ),
        "sglang",
        "sglang leaves out base_model.model.visual.proj.lora_A.weight, which is in no layer",
    ),
    (
        lambda t, _: None,
        "vllm-shared",
        "must have one A for gate and up and one B for down in the layout 'shared_outer', got",
    ),
    (lambda _, c: c.pop("r"), "vllm", "adapter_config.json must have the fields of a LoRA config, got no r"),
    (
        lambda t, _: t.update({n: e * torch.nan for n, e in t.items() if "o_proj" in n}),
        "vllm",
        "o_proj, matrix 0, must stay the same, got a difference of nan",
    ),
]


@pytest.mark.parametrize(("change", "target", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refusals(change: Change, target: str, message: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(saved, change)
    command = [
        "adapters",
        str(saved / "peft"),
        "--model",
        str(saved / "base"),
        "--to",
        target,
        "--out",
        str(saved / "out"),
    ]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not [*saved.glob("out/*")]


@pytest.fixture(scope="module")
def one_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save(folder)
    return folder


@pytest.fixture
def saved(one_adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one_adapter, tmp_path / "copy"))


def test_report(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["adapters", str(saved / "peft")]) == 0
    text = capsys.readouterr().out
    assert "config.json not given" in text and "as PEFT saves them since 0.19.1" in text
    rows = [line.split() for line in text.splitlines()]
    (row,) = (row for row in rows if row[:1] == ["experts.gate_up_proj"])
    assert row[1:9] == ["6", "[20,", "16]", "2", "1.5", "no", "12", "0"]
    assert main(["adapters", str(saved / "peft"), "--to", "vllm", "--out", str(saved / "out")]) == 2
    assert "model must be the config.json of the base model" in capsys.readouterr().err
    assert main(["adapters", str(saved / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
