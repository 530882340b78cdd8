"""The user's side: what `import everstep.runtime as es` offers, and the worker around it.

`run` is the user's API, `data` and `reduction` make a step independent of the slice count. `main`
decides what a process is (zygote, worker, alone), `worker` carries one incarnation from its
assignment to its ending, `alone` does the same without an agent. `control` is the worker's half of
the shared words, `distributed` the only place that touches JAX's private parts.
"""
