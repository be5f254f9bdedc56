"""Prints the folders with the headers of every CPython that a wheel has a module for, separated by colons.

    python cpp/cmake/python_headers.py build/headers

Of an interpreter on this machine if there is one (on PATH, of pyenv, of the container of manylinux), otherwise of
Debian's package libpython3.N-dev, which is unpacked into the folder. pyproject.toml has the versions, as classifiers.
"""

import lzma
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEBIAN = "http://deb.debian.org/debian"
SUITES = ("stable", "testing", "sid")
INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"


def versions() -> list[str]:
    """The supported versions: ["3.10", ...]."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def of_interpreter(version: str) -> Path | None:
    """The headers of an interpreter of this machine."""
    if version == sysconfig.get_python_version():
        candidates = [sys.executable]
    else:
        tag = version.replace(".", "")
        folders = [
            *Path.home().glob(f".pyenv/versions/{version}.*/bin"),
            *Path("/opt/python").glob(f"cp{tag}-cp{tag}/bin"),
        ]
        on_path = shutil.which(f"python{version}")
        candidates = [str(folder / f"python{version}") for folder in folders] + ([on_path] if on_path else [])
    for python in candidates:
        done = subprocess.run([python, "-c", INCLUDE], capture_output=True, text=True)  # a shim of pyenv may fail
        folder = Path(done.stdout.strip())
        if done.returncode == 0 and (folder / "Python.h").exists():
            return folder
    return None


def of_debian(version: str, folder: Path) -> Path | None:
    """The headers of Debian's package, from the first suite that has it."""
    headers = folder / f"usr/include/python{version}"
    for suite in SUITES:
        if (headers / "Python.h").exists():
            return headers
        with urllib.request.urlopen(f"{DEBIAN}/dists/{suite}/main/binary-amd64/Packages.xz", timeout=60) as response:
            index = lzma.decompress(response.read()).decode()
        found = re.search(rf"^Package: libpython{version}-dev\n(?:.+\n)*?Filename: (.+)$", index, re.MULTILINE)
        if found is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        archive, _ = urllib.request.urlretrieve(f"{DEBIAN}/{found[1]}", folder / "headers.deb")
        subprocess.run(["dpkg-deb", "--extract", archive, str(folder)], check=True)
    return headers if (headers / "Python.h").exists() else None


def main() -> None:
    """Print the folders, or name the versions without headers."""
    into = Path(sys.argv[1]).resolve()
    found = {version: of_interpreter(version) or of_debian(version, into / version) for version in versions()}
    missing = [version for version, folder in found.items() if folder is None]
    if missing:
        raise SystemExit(f"no headers of CPython {', '.join(missing)}: install these Pythons, with pyenv for example")
    print(*found.values(), sep=":")


if __name__ == "__main__":
    main()
