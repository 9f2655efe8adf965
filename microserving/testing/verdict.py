"""Judges what a run left: every rule that must hold whatever fails and whoever leaves.

Pure: looks at an ``Outcome``, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from microserving.errors import DeadlineExceeded, InternalError, LeaseError, MicroservingError, ServiceError
from microserving.router.program_loader import LoadedProgram
from microserving.testing.client import Client
from microserving.testing.faults import Moment
from microserving.testing.gauges import astray
from microserving.testing.reference import output_of, score_of, text_of
from microserving.testing.report import Finding, FindingKind, Verdict
from microserving.testing.trial import Outcome

_SOON_S = 1.0
"""What ends at once may take so long."""
_CLEAN_UP = frozenset({"abort"})
"""What a program may still ask for when its client has left."""


def judge(out: Outcome, program: LoadedProgram, gauges: frozenset[str]) -> Verdict:
    """gauges: the program's own counters, known from a run without a fault."""
    rules: list[Callable[[], Iterator[Finding]]] = [
        lambda: _about_clients(out, program),
        lambda: _about_calls(out),
        lambda: _about_leaks(out),
        lambda: _about_counters(out, gauges),
    ]
    findings = tuple(dict.fromkeys(finding for rule in rules for finding in rule()))
    return Verdict(out.scene.name, tuple(out.stage.met), findings, out.ended_s)


def _about_clients(out: Outcome, program: LoadedProgram) -> Iterator[Finding]:
    for client in out.clients:
        if client.stuck:
            if not out.stage.runaway.is_set():
                yield _found("hang", f"a request does not end{_where(out, client, program)}")
            continue
        yield from _about_time(out, client, program)
        if client.error is not None:
            yield from _about_error(out, client, program)
        if client.left is not None:
            yield from _about_leaving(out, client)
        yield from _about_output(client)


def _about_time(out: Outcome, client: Client, program: LoadedProgram) -> Iterator[Finding]:
    deadline = out.clients.index(client) * out.scene.apart_s + (client.request.timeout_s or float("inf"))
    if client.ended is not None and client.ended > deadline + _SOON_S:
        yield _found("hang", f"a request ends seconds after its deadline{_where(out, client, program)}")


def _about_error(out: Outcome, client: Client, program: LoadedProgram) -> Iterator[Finding]:
    error = client.error
    if any(chunk.finish_reason is not None for chunk in client.chunks):
        yield _found("ending", f"a request has two endings: its last chunk, then an error ({error})")
    elif isinstance(error, InternalError):
        cause = error.__cause__
        if cause is None:
            yield _found("bug", f"{error.message}{_where(out, client, program)}")
        else:
            at = program.locate(cause).rpartition("/")[2]
            yield _found("bug", f"the program raised {type(cause).__name__}: {cause} ({at})")
    elif not isinstance(error, MicroservingError):
        yield _found("bug", f"a request ends with {type(error).__name__}: {error}")
    elif not _is_excused(out, error):
        yield _found("error", f"a client sees {error.code}, although another engine of the role lived")


def _is_excused(out: Outcome, error: MicroservingError) -> bool:
    """Whether nobody could have served the request."""
    faults = {fault for _, fault in out.stage.met}
    if isinstance(error, DeadlineExceeded):
        return "silent" in faults
    hit = {moment.engine for moment, fault in out.stage.met if not fault.startswith("client_")}
    by_role = [
        {engine_id for engine_id in out.cluster.engines if engine_id.startswith((role, "hybrid"))}
        for role in ("prefill", "decode")
    ]
    nobody_left = any(pool and pool <= hit for pool in by_role)
    everywhere = any(fault.startswith("all_") for fault in faults)
    return (nobody_left or everywhere) and isinstance(error, ServiceError | LeaseError)


def _about_leaving(out: Outcome, client: Client) -> Iterator[Finding]:
    left, ended = client.left or 0.0, client.ended or 0.0
    if client.after_leaving:
        yield _found("cancel", "the program swallows its cancellation: the output goes on without its client")
    if ended > left + _SOON_S:
        yield _found("cancel", "a request ends seconds after its client left")
    asked = [
        moment
        for moment in out.stage.moments
        if moment.at > left and _is_of(moment, client) and moment.verb not in _CLEAN_UP
    ]
    if asked:
        line = "" if asked[0].line is None else f" (line {asked[0].line})"
        what = "a token" if asked[0].verb == "chunk" else asked[0].verb
        yield _found("cancel", f"the program still asks for {what} when its client has left{line}")


def _about_output(client: Client) -> Iterator[Finding]:
    wanted = output_of(client.request)[len(client.request.resume_output_ids) :]
    tokens = tuple(token for chunk in client.chunks for token in chunk.token_ids)
    whole = client.error is None and client.left is None
    yield from _about_tokens(tokens, wanted, whole=whole)
    if client.request.logprobs is not None:
        scores = [score for chunk in client.chunks for score in chunk.logprobs]
        if scores != [score_of(token) for token in tokens]:
            yield _found("tokens", "the log-probabilities are not those of the tokens")
    lasts = [number for number, chunk in enumerate(client.chunks, 1) if chunk.finish_reason is not None]
    if len(lasts) > 1 or (lasts and lasts[0] != len(client.chunks)):
        yield _found("ending", "a request has two endings")
    if not whole:
        return
    if not lasts:
        yield _found("ending", "a request has no ending: neither a last chunk nor an error")
    elif tokens == wanted:
        last, text = client.chunks[-1], "".join(chunk.text for chunk in client.chunks)
        if text != text_of(wanted):
            yield _found("tokens", "the text is not that of the tokens")
        usage = (last.prompt_tokens, last.completion_tokens)
        if usage != (len(client.request.prompt_token_ids), len(output_of(client.request))):
            yield _found("tokens", "the usage in the last chunk is wrong")


def _about_tokens(tokens: Sequence[int], wanted: Sequence[int], *, whole: bool) -> Iterator[Finding]:
    pairs = zip(tokens, wanted, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(wanted)))
    if at == len(tokens):
        if whole and at < len(wanted):
            yield _found("tokens", "tokens are missing at the end of the output")
    elif tokens[at] in tokens[:at]:
        yield _found("tokens", "a client gets tokens twice")
    elif tokens[at] in wanted[at + 1 :]:
        yield _found("tokens", "tokens are missing within the output")
    else:
        yield _found("tokens", "tokens are wrong: not those of the prompt, the seed and the position")


def _about_calls(out: Outcome) -> Iterator[Finding]:
    if out.stage.runaway.is_set():
        last = out.stage.moments[-1]
        line = "" if last.line is None else f" (line {last.line})"
        count = f"more than {out.stage.call_limit} verbs"
        yield _found("runaway", f"the program tries again without bound: {count}, {last.verb} at last{line}")


def _about_leaks(out: Outcome) -> Iterator[Finding]:
    for engine_id, kinds in out.held.items():
        role = engine_id.rpartition("-")[0]
        yield from (_found("leak", f"{kind} is left on a {role} engine") for kind in kinds)
    yield from (_found("leak", f"{task} still runs") for task in out.tasks)


def _about_counters(out: Outcome, gauges: frozenset[str]) -> Iterator[Finding]:
    if out.stuck:
        return
    counts = {
        "attempts under way": out.dispatcher.running,
        "uses of the program": out.host.uses,
        "requests in the ledger": len(out.dispatcher.ledger),
    }
    counts |= {
        f"requests in flight on a {engine.role} engine": count for engine, count in out.in_flight.items()
    }
    for name, count in counts.items():
        if count:
            yield _found("counter", f"the router counts {name} when all have ended")
    for message in astray(gauges, out.before, out.after):
        yield _found("counter", message)


def _where(out: Outcome, client: Client, program: LoadedProgram) -> str:
    """The last line of the program that waited, or asked, for this client."""
    own = client.request.request_id
    waits = [line for name, line in out.waited_at.items() if name.partition("-")[0] == own]
    asked = [each.line for each in out.stage.moments if _is_of(each, client) and each.line is not None]
    lines = waits or asked
    return f" ({program.path.name}:{lines[-1] if lines else program.line})"


def _is_of(moment: Moment, client: Client) -> bool:
    return moment.request_id.partition("-")[0] == client.request.request_id


def _found(kind: FindingKind, message: str) -> Finding:
    return Finding(kind, message)
