"""The names and modules that `import maxmoe` loads."""

import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import maxmoe
from support import programs

PACKAGES = (module.name for module in pkgutil.iter_modules(maxmoe.__path__) if module.ispkg)
INTERNAL = {
    "_torch",
    "adapters",
    "checks",
    "cli",
    "families",
    "ranks",
    "recompute",
}  # their public names are in other packages
PUBLIC = sorted({*PACKAGES} - INTERNAL)
FIRST_IMPORT = f"""
import json, sys
import torch
before = {{*sys.modules}}
import maxmoe
loaded, names = {{*sys.modules}} - before, dir(maxmoe)
from torch.distributed import fsdp
del fsdp.DataParallelMeshDims
for name in {PUBLIC}: getattr(maxmoe, name).__doc__.strip()
maxmoe.presets.mixtral()
print(json.dumps({{"loaded": [*loaded], "names": names, "loaded with packages": [*sys.modules]}}))
"""


@pytest.fixture(scope="module")
def first_import() -> dict[str, Any]:
    """Modules and names after the first import in a process with torch; every package is an attribute.

    The process has only what torch 2.11 has, because machines with a GPU may have no other torch.
    """
    found: dict[str, Any] = json.loads(programs.printed(programs.python(FIRST_IMPORT)))
    return found


def test_the_first_import_loads_torch_and_maxmoe_alone(first_import: dict[str, Any]) -> None:
    """The import takes less than 0.2 s beyond torch's; DTensor, transformers or matplotlib would take longer."""
    assert {*maxmoe.__all__, *PUBLIC} == set(first_import["names"])
    assert "maxmoe" in first_import["loaded"] and "maxmoe.parallel" not in first_import["loaded"]
    assert [name for name in first_import["loaded"] if name.split(".")[0] != "maxmoe"] == []


def test_no_package_loads_the_compiler_or_transformers(first_import: dict[str, Any]) -> None:
    """The compiler takes half a second; modules that use it import it in a function. A preset needs no transformers."""
    loaded = {*first_import["loaded with packages"]}
    assert "maxmoe.pipelining.pipeline" in loaded
    assert not {"torch._dynamo", "transformers", "safetensors"} & loaded


def test_a_misspelt_name_has_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        maxmoe.shardin  # noqa: B018
    except AttributeError:
        sys.__excepthook__(*sys.exc_info())  # type: ignore[arg-type]
    assert "has no attribute 'shardin'. Did you mean: 'sharding'?" in capsys.readouterr().err


def test_a_folder_named_maxmoe_is_not_imported(tmp_path: Path) -> None:
    """A clone is such a folder for a script beside it. The installed package is imported."""
    (tmp_path / "maxmoe").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    programs.printed(programs.python("import maxmoe; maxmoe.__all__", cwd=tmp_path, env=environment))
