"""`everstep demo`: one training, many losses, and the proof that nothing changed.

`story` decides what happens when (pure), `stage` makes it happen by the product's own verbs,
`verdict` compares it with the undisturbed run, `show` puts it on the terminal, `command` is what
people type. Everything real is done by `everstep local`; this room only pulls the plugs.
"""
