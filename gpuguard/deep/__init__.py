"""The deep check's CUDA side: what runs in a child process, and only there."""
