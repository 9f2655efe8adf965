"""What comes out: tables, charts, the page, comparisons; and the command line, against a mock server."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microserving.bench import svg
from microserving.bench.charts import histogram, panel, timeline
from microserving.bench.measurement import INTERRUPTED, Measured
from microserving.bench.page import page
from microserving.bench.report import read_report, write_report
from microserving.bench.statistics import Slo, Spread, percentile, spread, summarize
from microserving.bench.table import notes_on, table
from microserving.bench.targets import transfers_between
from microserving.cli import main as cli
from microserving.errors import ConfigError

from .mock_server import Background, Plan
from .reports import BOTH, LABELS, records, report, run


def drawn(text: str) -> ET.Element:
    """The picture; it is XML, and needs nothing from elsewhere."""
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    return ET.fromstring(text)


def elements(picture: ET.Element, name: str) -> list[ET.Element]:
    return picture.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_the_panel_has_a_line_for_each_pattern_in_each_of_six_plots() -> None:
    picture = drawn(panel(BOTH))
    lines = [line.attrib["points"] for line in elements(picture, "polyline")]
    assert len(lines) == 12
    assert all(len(points.split()) == 2 for points in lines)
    words = {element.text for element in elements(picture, "text")}
    titles = {f"{name}, {figure}" for name in ("TTFT", "TPOT", "JCT") for figure in ("mean", "P99")}
    assert words >= {*titles, *LABELS}
    # mean JCT of the second pattern at 1/s is 2 s, twice that of the first: twice as high above the axis
    first, second = (float(points.split()[1].split(",")[1]) for points in lines[4:6])
    bottom = max(
        float(line.attrib["y2"]) for line in elements(picture, "line") if float(line.attrib["y2"]) < 320
    )
    assert bottom > first > second


def test_there_is_no_panel_without_rates() -> None:
    assert panel(report(run("a", None, 1.0))) == ""


def test_the_histogram_has_all_gaps() -> None:
    picture = drawn(histogram(BOTH["runs"][:2], LABELS))
    hints = [element.text or "" for element in elements(picture, "title")]
    shares = [float(hint.rpartition(" ")[2].rstrip("%")) for hint in hints]
    assert sum(shares) == pytest.approx(200, abs=0.2)  # 100 % of each of the two


def test_the_time_line_has_every_request() -> None:
    failed = Measured(99, 5.0, sent=5.1, error="timeout", ended=6.0)
    picture = drawn(timeline(run("a", 1.0, 1.0, failed)))
    hints = [element.text or "" for element in elements(picture, "title")]
    assert len({hint.split(":")[0] for hint in hints}) == 11
    assert sum("timeout" in hint for hint in hints) == 2


def test_the_time_line_of_a_long_run_shows_its_beginning() -> None:
    long = run("a", 1.0, 1.0) | {"requests": [record.as_dict() for record in records(1.0, 1500)]}
    picture = drawn(timeline(long))
    assert len(elements(picture, "title")) == 3 * 1000
    assert "a, 1/s, the first 1000 requests of 1501" in {
        element.text for element in elements(picture, "text")
    }


@pytest.mark.parametrize(
    ("value", "end", "marks"),
    [(3.2, 4.0, [0, 1, 2, 3, 4]), (100, 100, [0, 20, 40, 60, 80, 100]), (0.7, 0.8, [0, 0.2, 0.4, 0.6, 0.8]), (0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)  # fmt: skip
def test_axes_are_round(value: float, end: float, marks: list[float]) -> None:
    assert svg.round_up(value) == pytest.approx(end)
    assert svg.ticks(svg.round_up(value)) == pytest.approx(marks)


def test_the_page_stands_alone_and_escapes_names() -> None:
    text = page(BOTH, "A & B")
    assert "<script" not in text
    assert "src=" not in text
    assert "<&>" not in text
    assert text.count("<svg") == 1 + 2 + 4  # the panel, a histogram for each rate, a time line for each run
    assert "0.5/s" in text
    assert "2.0 ms" in text  # of writing, for each hand-off
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_page_of_nothing_and_of_a_measurement_that_broke_off() -> None:
    empty = page(report(stopped=True, error="its router <b> does not answer"))
    assert "Ended early: its router &lt;b&gt; does not answer." in empty
    assert "<svg" not in empty
    nothing = Measured(0, 0.0, sent=0.0, error="503 overloaded", ended=0.1)
    failed = run("a", 1.0, 1.0) | {
        "summary": summarize([nothing]).as_dict(),
        "requests": [nothing.as_dict()],
    }
    assert "1 failed: 503 overloaded" in page(report(failed))


def test_each_phase_of_a_mix_is_shown() -> None:
    measured = records(1.0)
    for record in measured:
        record.phase = "600/20" if record.session % 2 else "50/200"
    mixed = run("a", 1.0, 1.0) | {"summary": summarize(measured).as_dict()}
    for shown in (page(report(mixed)), table(report(mixed))):
        for phase in ("600/20", "50/200"):
            assert f"{phase}: TTFT" in shown


def test_goodput_is_shown_when_there_are_objectives() -> None:
    of_nine_seconds = report(run("a", 1.0, 1.0))
    assert "<td>-</td><td>2 MB</td>" in page(of_nine_seconds)
    assert "<td>1.00</td><td>2 MB</td>" in page({**of_nine_seconds, "slo": {"jct": 2.0}})


def test_the_table() -> None:
    lines = table({**BOTH, "slo": {"jct": 2.0}}).splitlines()
    assert lines[0].split()[:3] == ["PATTERN", "LOAD", "OK"]
    assert [line.split("  ")[0] for line in lines[1:5]] == [*LABELS, *LABELS]
    assert lines[4].split()[-4:] == ["100", "%", "2", "MB"]
    assert "2.00 s" in lines[4]
    assert len(lines) == 5
    assert "%" not in table(BOTH)
    alone = table(report(run("a", None, 1.0)))
    assert "TTFT, from the time it was sent" in alone
    assert table(report()) == "nothing was measured\n"
    assert table({**BOTH, "error": "the router is gone"}).endswith("ended early: the router is gone\n")


def test_what_a_reader_must_know_is_said() -> None:
    late = Measured(50, 1.0, sent=9.0, error=INTERRUPTED)
    refused = Measured(51, 1.0, sent=1.0, error="503 overloaded", ended=1.1)
    told = " | ".join(notes_on(run("a", 1.0, 1.0, late, refused)))
    assert "a, 1/s: 1 failed: 503 overloaded" in told
    assert "1 of 11 had not ended when the run did" in told
    assert notes_on(run("a", 1.0, 1.0)) == []
    assert notes_on(run("a", 1.0, 1.0) | {"disturbance": "it fell"}) == ["a, 1/s: WRONG: it fell"]


def test_percentiles_and_spreads() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx(
        [1, 2.5, 3.7, 4]
    )
    assert spread([None, None]) == Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=2", "x=2s", "ttft=2s;tpot=1s", "ttft=-1s"])
def test_what_is_no_objective(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        Slo.parse(text)


def test_transfers_are_what_came_in_between() -> None:
    before = {
        "transfers": {
            "hand_offs": 1,
            "tokens_sent": 10,
            "bytes_sent": 100,
            "transfer_ms": 2.0,
            "exposed_ms": 1.0,
        }
    }
    after = {
        "transfers": {
            "hand_offs": 4,
            "tokens_sent": 40,
            "bytes_sent": 500,
            "transfer_ms": 8.0,
            "exposed_ms": 3.0,
        }
    }
    found = transfers_between(before, after)
    assert found is not None
    assert found.as_dict() == {
        "hand_offs": 3, "tokens_sent": 30, "bytes_sent": 400, "transfer_ms": 6.0, "exposed_ms": 2.0, "hidden_ms": 4.0
    }  # fmt: skip
    assert transfers_between(before, None) is None
    assert transfers_between(after, before) is None  # the router was started again


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_report(tmp_path / "a.json", BOTH)
    assert read_report(tmp_path / "a.json") == json.loads(json.dumps(BOTH))
    for text in (
        "",
        "[]",
        "[" * 100_000,
        '{"format": 0, "runs": []}',
        '{"format": NaN}',
        '{"format": 1e999}',
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ConfigError, match=r"b\.json"):
            read_report(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("runs",), [{}], r"missing required field `label` - at `\$.runs\[0\]`"),
        (("runs", 0, "requests"), [5], r"Expected `object`, got `int` - at `\$.runs\[0\].requests\[0\]`"),
        (("runs", 0, "requests"), [{}], r"missing required field `session`"),
        (("runs", 0, "summary", "latencies", "ttft", "mean"), "x", "Expected `float`, got `str`"),
        (("machine",), None, "Expected `object`, got `null`"),
    ],
)
def test_a_damaged_report_is_refused(
    where: tuple[str | int, ...], value: Any, said: str, tmp_path: Path
) -> None:
    data = json.loads(json.dumps(BOTH))
    place = data
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=rf"a\.json: a damaged report: .*{said}"):
        read_report(tmp_path / "a.json")


def test_what_a_later_version_adds_to_a_record_is_left_out() -> None:
    assert Measured.from_dict({"session": 1, "scheduled": 2.0, "colour": "red"}) == Measured(1, 2.0)


# The command line


@pytest.fixture
def server() -> Iterator[Background]:
    with Background(itertools.repeat(Plan(0.01, (0.002,) * 4, prompt_tokens=600))) as server:
        yield server


def test_bench_against_an_address(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["microserving", "bench", "--api-key", "sekret", "--api-key=sekret", "x"])
    files = [tmp_path / name for name in ("a.json", "a.html", "a.svg")]
    out = [f"--{path.suffix[1:]}={path}" for path in files]
    load = ["--rate", "40,80", "--requests", "8", "--warmup", "2", "--slo", "ttft=60s"]
    targets = ["--base-url", f"one={server.url}", "--base-url", f"two={server.url}"]
    assert cli.main(["bench", *targets, *load, *out, "--api-key", "sekret"]) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[1:5]] == ["one", "two", "two", "one"]
    assert "4 runs, about 33 s at least" in shown.err
    assert "[4/4] one, 80/s: 8/8 done, " in shown.err
    assert set(server.server.keys) == {b"bearer sekret"}
    data = json.loads(files[0].read_text())
    assert [(r["label"], r["rate"]) for r in data["runs"]] == [
        ("one", 40),
        ("two", 40),
        ("two", 80),
        ("one", 80),
    ]
    for of in data["runs"]:
        assert (of["summary"]["completed"], of["summary"]["good"]) == (8, 8)
        assert of["summary"]["output_tokens"] == 40
        assert of["summary"]["latencies"]["ttft"]["p50"] >= 0.01
    assert data["machine"]["cores"]
    assert data["versions"]["microserving"]
    assert data["targets"][0]["model"] == "mock"
    assert data["command"] == "microserving bench --api-key '***' '--api-key=***' x"
    assert "sekret" not in files[0].read_text() + files[1].read_text()
    drawn(files[2].read_text())
    assert "<svg" in files[1].read_text()
    bodies = [served.body for served in server.server.served if served.body["max_tokens"] == 60]
    assert all(body["model"] == "mock" and "cache_salt" not in body for body in bodies)
    again = str(tmp_path / "b.html")
    assert cli.main(["bench", "page", str(files[0]), again]) == 0
    assert Path(again).read_text() == files[1].read_text()
    assert cli.main(["bench", "compare", str(files[0]), str(files[0])]) == 0
    assert "1.000" in capsys.readouterr().out
    assert cli.main(["bench", "compare", str(files[0]), "--baseline", "two"]) == 0
    assert "A is two" in capsys.readouterr().out


@pytest.mark.parametrize("model", [[], ["--model", "mock"]])
def test_no_run_finds_the_prompts_of_another_one_in_the_cache_of_a_server_of_ours(
    server: Background, model: list[str]
) -> None:
    server.server.owned_by = "microserving"
    load = ["--concurrency", "1,2", "--requests", "2", "--warmup", "0", "--no-keep-load"]
    for _ in range(2):
        assert cli.main(["bench", "--base-url", server.url, *model, *load]) == 0
    bodies = [served.body for served in server.server.served if served.body["max_tokens"] == 60]
    salts = [body["cache_salt"] for body in bodies if not body["cache_salt"].startswith("try-")]
    assert (len(salts), len(set(salts))) == (8, 4)


def test_ctrl_c_keeps_what_was_measured(server: Background, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "microserving", "bench", "--base-url", server.url]
    more = ["--concurrency", "1", "--requests", "100000", "--warmup", "0", "--json", str(tmp_path / "a.json")]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(server.server.served) < 9:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"TTFT, from the time it was sent" in out
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["stopped"]
    assert data["runs"][0]["summary"]["completed"] >= 1
    assert data["runs"][0]["summary"]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure: give --base-url or --config"),
        (["--base-url", "http://x/v1"], "how much? give --rate or --concurrency"),
        (["--base-url", "http://x", "--rate", "1", "--concurrency", "1"], "--rate and --concurrency exclude each other"),
        (["--base-url", "http://x", "--rate", "0"], "'0' is not a number above 0"),
        (["--base-url", "http://x", "--rate", "abc"], "'abc' is not a number above 0"),
        (["--base-url", "http://x", "--request-rate", "2"], "unrecognized arguments: --request-rate"),
        (["--base-url", "http://x", "--num-prompts=3"], "unrecognized arguments: --num-prompts=3"),
        (["compare", "a.json", "b.json", "--baseline", "x"], "--baseline is for one report"),
        (["--base-url", "http://x", "--rate", "1", "--input", "x"], "'x' is no length in tokens"),
        (["--base-url", "http://x", "--rate", "1", "--slo", "x=1"], "'x=1' is no objective"),
        (["--base-url", "http://x", "--rate", "1", "--workload", "trace"], "--workload trace and --trace FILE go together"),
        (["--base-url", "http://x", "--rate", "1", "--workload", "mix"], "--workload mix and --phase go together"),
        (["--base-url", "http://x", "--rate", "1", "--program", "p"], "--program is for clusters of --config"),
        (["--base-url", "http://x", "--rate", "1", "--extra-body", "[]"], "'[]' is no JSON object"),
        (["--base-url", "http://x", "--rate", "1", "--extra-body", '{"n": 2}'], "a request is one streamed answer"),
        (["--base-url", "http://x", "--rate", "1", "--extra-body", '{"stream": false}'], "a request is one streamed answer"),
        (["--base-url", "http://x", "--rate", "1", "--warmup", "-1"], "'-1' is not a number, 0 or more"),
        (["--base-url", "http://x", "--rate", "1", "--system-tokens", "-1"], "'-1' is not a number, 0 or more"),
        (["--base-url", "http://x", "--rate", "1", "--temperature", "nan"], "'nan' is not a number, 0 or more"),
        (["--base-url", "http://x", "--rate", "1", "--top-p", "2"], "2 is above 1"),
        (["--base-url", "http://x", "--concurrency", "1", "--constant"], "--constant is for --rate"),
        (["--base-url", "http://x", "--rate", "1", "--trace-ms"], "--trace-ms is for --trace"),
        (["--base-url", "http://x", "--rate", "1", "--speed", "2"], "--speed is for the times of --trace"),
        (["--base-url", "http://x", "--concurrency", "1", "--svg", "a.svg"], "give --rate"),
        (["--base-url", "http://x", "--rate", "1", "--json", "no/a.json"], "cannot write no/a.json"),
        (["--base-url", "http://x", "--rate", "1", "--html", "."], "cannot write ."),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "x", "--rate", "1"], "'x' is no address of a server"),
        (["--base-url", "http://127.0.0.1:9/v1", "--rate", "1"], "nobody answers at http://127.0.0.1:9/v1"),
        (["--base-url", "a=http://x", "--base-url", "a=http://y", "--rate", "1"], "two candidates are called 'a'"),
        (["--config", "no.toml", "--rate", "1"], "cannot read no.toml"),
        (["--config", "no.toml", "--rate", "1", "--program", "none"], "none"),
        (["--base-url", "http://x", "--workload", "trace", "--trace", "no.jsonl"], "cannot read the trace no.jsonl"),
        (["--config", "configs/1p1d.toml", "--rate", "1", "--program", "balanced_prefill_decode:pd_balance_factor=2"],
         "setting 'pd_balance_factor' is wrong"),
        (["compare", "no.json"], "cannot read no.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_failed_requests_end_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    good = [Plan(0.001, (0.001,))] * 4
    with Background(
        itertools.chain(good, itertools.repeat(Plan(cut=True, first_s=0.001, gaps=())))
    ) as server:
        load = ["--concurrency", "1", "--requests", "4", "--warmup", "0"]
        assert cli.main(["bench", "--base-url", server.url, *load]) == 1
    assert "failed: the stream was cut off" in capsys.readouterr().out
