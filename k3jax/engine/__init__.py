"""Many requests at once: pools, scheduler, prefix cache, engine, batch files."""
