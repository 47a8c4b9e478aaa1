"""Pages in a real browser: a package, so that its world and its browser end with it."""
