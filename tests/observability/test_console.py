"""Lines and progress on a terminal and elsewhere."""

from __future__ import annotations

import io

from microserving.observability.console import Console, parse_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_progress_is_a_line_every_tenth_and_parses_back() -> None:
    stream = io.StringIO()
    console = Console(stream, plain_step=0.1)
    for hundredth in range(101):
        console.progress("fetching x", hundredth / 100)
    lines = stream.getvalue().splitlines()
    assert [parse_progress(line) for line in lines] == [("fetching x", tenth / 10) for tenth in range(11)]


def test_every_stage_begins_a_line() -> None:
    stream = io.StringIO()
    console = Console(stream)
    report = console.reporter("prefill-0")
    report("reading", 0.05)
    report("compiling", 0.06)
    assert stream.getvalue() == "[progress] prefill-0: reading 5%\n[progress] prefill-0: compiling 6%\n"


def test_stages_that_run_side_by_side_are_counted_apart() -> None:
    stream = io.StringIO()
    console = Console(stream, plain_step=0.5)
    for fraction in (0.0, 0.25, 0.5, 1.0):
        console.progress("a", fraction)
        console.progress("b", fraction)
    wanted = [(stage, fraction) for fraction in (0.0, 0.5, 1.0) for stage in "ab"]
    assert [parse_progress(line) for line in stream.getvalue().splitlines()] == wanted


def test_a_stage_that_starts_again_is_shown_again() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for fraction in (1.0, 0.0, 1.0):
        console.progress("a", fraction)
    assert stream.getvalue() == "[progress] a 100%\n[progress] a 0%\n[progress] a 100%\n"


def test_on_a_terminal_a_bar_is_redrawn_and_ended_by_the_next_line() -> None:
    stream = Terminal()
    console = Console(stream)
    console.progress("x", 0.5)
    console.line("done")
    assert stream.getvalue() == "\r\x1b[K[" + "#" * 15 + "." * 15 + "]  50% x\ndone\n"


def test_a_finished_bar_keeps_its_line() -> None:
    stream = Terminal()
    console = Console(stream)
    console.progress("x", 1.0)
    console.progress("x", 1.0)
    assert stream.getvalue() == "\r\x1b[K[" + "#" * 30 + "] 100% x\n"


def test_fractions_out_of_range_are_clamped() -> None:
    stream = io.StringIO()
    Console(stream).progress("x", -3)
    Console(stream).progress("x", 7)
    assert stream.getvalue() == "[progress] x 0%\n[progress] x 100%\n"


def test_other_lines_are_no_progress() -> None:
    assert parse_progress("2026 INFO x 10%") is None
    assert parse_progress("[progress] 10%") is None


def test_a_closed_stream_is_ignored() -> None:
    stream = io.StringIO()
    console = Console(stream)
    stream.close()
    console.line("x")


def test_detail_only_when_verbose() -> None:
    quiet, loud = io.StringIO(), io.StringIO()
    Console(quiet).detail("x")
    Console(loud, verbose=True).detail("x")
    assert (quiet.getvalue(), loud.getvalue()) == ("", "x\n")
