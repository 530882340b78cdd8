"""One machine as a world: host processes, a state folder, and nothing else installed.

The state folder is the whole truth; every process that touches it may be killed at any line.
Nothing here decides what happens to a job, that is `core`; nothing here prints, that is `cli`.
"""
