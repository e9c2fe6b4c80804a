"""Cards as the kernel lists them on the PCI bus."""

from __future__ import annotations

from pathlib import Path


def add_cards(bus: Path, count: int) -> None:
    for number in range(1, count + 1):
        folder = bus / f"0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", "0x10de"), ("device", "0x2b85"), ("class", "0x030000")):
            (folder / name).write_text(f"{value}\n")
        (folder / "driver").symlink_to("/sys/bus/pci/drivers/nvidia")
