"""How a held step becomes a checkpoint, and how old ones go.

`orbax` (pure) knows the layout, `draft` writes a host's part, `commit` makes a draft real,
`discover` lists what is real, `retention` (pure) chooses what goes, `clean` deletes it.
"""
