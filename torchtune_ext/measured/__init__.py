"""Extract, screen, compile, verify and time programs that a model wrote, in a sandbox."""
