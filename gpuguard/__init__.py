"""gpuguard keeps GPU hosts clean: patched NVIDIA modules that stay patched."""

__version__ = "0.1.0"
