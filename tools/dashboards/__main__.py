"""Write the dashboards' JSON into the package."""

from __future__ import annotations

from tools.dashboards import FOLDER, rendered

FOLDER.mkdir(parents=True, exist_ok=True)
for path, text in rendered():
    path.write_text(text)
