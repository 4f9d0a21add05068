"""Multi-head attention residuals for PyTorch."""
