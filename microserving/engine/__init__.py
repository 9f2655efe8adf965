"""One engine: requests in, model steps over a paged KV pool, chunks out; and KV handed from engine to engine.

Owns: the step (schedule, run, sample, complete), its thread, the model runner and its kernels, the hand-off. Does not
know: HTTP, OpenAI's or the verbs' wire forms, routers.

Import from the modules: ``engine.engine`` and ``engine.async_engine`` need no TVM, ``engine.model_runner`` does.
"""
