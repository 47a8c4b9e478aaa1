"""Documentation: what a reader types works, what the code has is told, and every link leads on."""
