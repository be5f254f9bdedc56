"""What `import maxmoe` gives."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import maxmoe

PACKAGES = (module.name for module in pkgutil.iter_modules(maxmoe.__path__) if module.ispkg)
PUBLIC = sorted({*PACKAGES} - {"recompute"})  # its names are in maxmoe and maxmoe.nn


def run(code: str) -> str:
    """Run code in a new process, in which nothing of maxmoe has been imported."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_every_package_is_an_attribute() -> None:
    run(f"import maxmoe\nfor name in {PUBLIC}: getattr(maxmoe, name).__doc__.strip()")


def test_dir_shows_what_is_public() -> None:
    names = run("import maxmoe; print(*dir(maxmoe))").split()
    assert {*maxmoe.__all__, *PUBLIC} == set(names)


def test_importing_maxmoe_does_not_import_what_is_slow() -> None:
    loaded = run("import sys, maxmoe; print(*sys.modules)").split()
    assert not {"torch.distributed.tensor", "transformers", "matplotlib", "maxmoe.parallel"} & set(loaded)


def test_a_misspelt_name_has_the_nearest_one() -> None:
    result = subprocess.run([sys.executable, "-c", "import maxmoe; maxmoe.shardin"], capture_output=True, text=True)
    assert "has no attribute 'shardin'. Did you mean: 'sharding'?" in result.stderr


def test_a_folder_named_maxmoe_is_not_imported(tmp_path: Path) -> None:
    """The clone is such a folder for a script beside it. What is imported is what has been installed."""
    (tmp_path / "maxmoe").mkdir()
    subprocess.run([sys.executable, "-c", "import maxmoe; maxmoe.MoE"], check=True, cwd=tmp_path)
