"""Lanes and quality gates of the serving stack; imports nothing from build or apply."""
