"""Programs that a model wrote: taken from its text, screened, compiled, verified and timed on this machine, in a sandbox."""
