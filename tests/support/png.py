"""Contents of PNG files."""

from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np


def share(path: Path, color: str) -> float:
    """Return the share of the pixels that have a color."""
    pixels: np.ndarray = matplotlib.image.imread(path)[..., :3]
    return float((abs(pixels - matplotlib.colors.to_rgb(color)) < 0.02).all(-1).mean())
