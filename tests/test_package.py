"""What `import maxmoe` gives."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import maxmoe
from support.python_with_torch import Python

PACKAGES = (module.name for module in pkgutil.iter_modules(maxmoe.__path__) if module.ispkg)
PUBLIC = sorted({*PACKAGES} - {"adapters", "recompute"})  # internal; names of recompute are in maxmoe and maxmoe.nn


def printed(python: Python, code: str) -> str:
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_is_an_attribute(python: Python) -> None:
    printed(python, f"import maxmoe\nfor name in {PUBLIC}: getattr(maxmoe, name).__doc__.strip()")


def test_dir_shows_what_is_public(python: Python) -> None:
    names = printed(python, "import maxmoe; print(*dir(maxmoe))").split()
    assert {*maxmoe.__all__, *PUBLIC} == set(names)


def test_importing_maxmoe_does_not_import_what_is_slow(python: Python) -> None:
    loaded = printed(python, "import sys, maxmoe; print(*sys.modules)").split()
    assert not {"torch.distributed.tensor", "transformers", "matplotlib", "maxmoe.parallel"} & set(loaded)


def test_a_misspelt_name_has_the_nearest_one(python: Python) -> None:
    result = python("import maxmoe; maxmoe.shardin")
    assert "has no attribute 'shardin'. Did you mean: 'sharding'?" in result.stderr


def test_a_folder_named_maxmoe_is_not_imported(tmp_path: Path) -> None:
    """The clone is such a folder for a script beside it. What is imported is what has been installed."""
    (tmp_path / "maxmoe").mkdir()
    subprocess.run([sys.executable, "-c", "import maxmoe; maxmoe.MoE"], check=True, cwd=tmp_path)
