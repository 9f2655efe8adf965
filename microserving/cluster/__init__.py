"""A whole cluster on one machine: its TOML file, the plan made from it, and the processes.

Import from the modules: ``config`` (TOML), ``topology`` (who runs where), ``launcher`` (`microserving up`). Nothing is
imported here, so that a router process can use ``command_line`` and ``secret`` without loading engine code.
"""
