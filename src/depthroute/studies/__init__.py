"""Paired comparisons stated in one file: grids of runs, their statistics, compute-equivalent gains."""
