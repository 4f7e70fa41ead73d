"""The table of decisions' quality follows from the samples that were read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tools import decision_quality
from tools.decision_quality import MARKS, main


def test_a_table_is_written_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    samples, page = tmp_path / "samples", tmp_path / "page.md"
    lines = []
    for number in range(120):
        sure = float(rng.uniform(0.5, 1))
        found = {"raw": [sure, 1 - sure], "l0": [sure, 1 - sure], "flips": [0.5, 0.25]}
        right = int(rng.random() > sure)
        line = {"task": "section4", "number": number, "right": right, **found}
        lines.append(json.dumps(line | ({"relisted": False} if number == 0 else {})))
    samples.write_text("\n".join(lines))
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    monkeypatch.setattr(decision_quality, "PAGE", page)
    result = CliRunner().invoke(main, ["show", str(samples)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith(f"before\n{MARKS[0]}\n| Task |")
    assert "| Debian section of a package, 4 of 10 | 60 + 60 | " in text
    assert "0.500 / 0.250" in text
    assert "| all of these together | 60 + 60 |" in text
    assert "in 0 of 1 decisions" in text
    assert text.endswith(f"\n{MARKS[1]}\nafter\n")
    assert "old" not in text
