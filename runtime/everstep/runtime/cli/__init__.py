"""`everstep checkpoint`: what people type about checkpoints. Reads; never writes to a run."""
