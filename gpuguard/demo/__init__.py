"""The incident, played on a host tree of its own: no GPU, no driver, nothing outside it."""
