"""Metrics as Prometheus reads them, and the reference that documents them."""
