"""What is measured: one module per system, with its job and its sender."""
