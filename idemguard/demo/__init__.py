"""Three workers, overlapping batches of real documents: what doubles, and what claiming saves.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from pathlib import Path

from idemguard.demo.reading import Figures, figures

__all__ = ["TEXTS", "Figures", "figures"]

TEXTS = Path(__file__).with_name("texts")  # the documents that are read where no folder is given
