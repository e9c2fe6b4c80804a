"""``gpuguard serve``: observe in children, serve what was observed last.

The process itself stays small and never waits: one event loop serves and proves to systemd that
it is alive, one thread at a time looks at the host, and what costs memory or may hang runs in
children with a deadline.
"""
