"""The command line: the only place where the pieces are wired together.

Each sub-command lives in a module of its own and imports what it needs when it runs, so that `--help` is quick and a
router process never loads engine code.
"""
