"""What every `core.model.World` promises, as tests: `checks` has them, a world brings a `Rig`."""
