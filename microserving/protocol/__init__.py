"""Wire data only: what crosses a process boundary, as plain data and JSON. No HTTP, no asyncio, no model.

Modules: ``generation`` (a generation as every layer passes it on), ``kv_layout``, ``body`` (strict JSON bodies),
``openai`` and ``microserving`` (request and answer fields), ``responses`` (OpenAI's answers), ``sse``. Nothing is
re-exported here, so that the pure layers (the scheduler) do not load the JSON models.
"""
