"""What gpuguard costs, measured: `make bench`. Figures and method go to results.md."""
