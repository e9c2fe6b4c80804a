"""Read a host: one module per subject, each with a pure parse_*() function."""
