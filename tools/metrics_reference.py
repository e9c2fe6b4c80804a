"""Write docs/metrics.md from the table of metrics: ``make docs``."""

from pathlib import Path

from gpuguard.exporter.reference import reference

(Path(__file__).parents[1] / "docs/metrics.md").write_text(reference())
