"""The contract between people, controller and runtime.

Here live the types of a `MultiSliceJob`, the directive that the controller writes, the report that
an agent sends back, and the one table of reasons. Pure: the standard library and msgspec only.
It is the only room of the controller that the runtime may import.
"""
