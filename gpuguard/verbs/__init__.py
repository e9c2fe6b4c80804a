"""What gpuguard can do, one module per use case; knows nothing of terminals."""
