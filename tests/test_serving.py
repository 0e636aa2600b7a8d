"""A server measured over HTTP: whatever it does is counted or said; never a hang, never a wrong figure."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import scripted_server
from typer.testing import CliRunner

from every_millisecond.cli import app
from every_millisecond.serving import load, report, servers
from every_millisecond.serving.client import Answer, ask, check_url, one_each
from every_millisecond.serving.events import EventDecoder

SCRIPTED = [sys.executable, str(Path(scripted_server.__file__)), "{port}"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with servers.serving(SCRIPTED, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


def answer(url: str, script: str, **options) -> Answer:
    async def one():
        async with aiohttp.ClientSession() as session:
            return await ask(session, url, MESSAGES, model=script, max_tokens=5, **options)

    return asyncio.run(one())


# -- the bytes --

TEXT = "data: 1\n\ndata: é\r\ndata: 2\r\n\r\n: comment\ndata:3\r\rid: 7\ndata\n\n"
STREAM = (TEXT + "dataset: 4\n\ndata: a\u2028b\n\ndata: lost").encode()
EVENTS = ["1", "é\n2", "3", "", "a\u2028b"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    """A token split over two chunks, a CR whose LF is still on its way, half a character: none may show."""
    decoder = EventDecoder()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in decoder.push(piece)] == EVENTS


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ValueError, match="UTF-8"):
        EventDecoder().push(b"data: \xff\n\n")


# -- good answers --


@pytest.mark.parametrize("script, text, pieces, tokens", [
    ("usage last", "a b", 2, 7), ("no usage", "a b", 2, None), ("no done", "a b", 2, None),
    ("several choices", "a b", 2, None), ("empty deltas", "a b", 2, None), ("carriage returns", "a b", 2, None),
    ("separator inside", "a\u2028b", 1, None), ("comments", "a b", 2, None), ("split", "néé\U0001f600", 2, None),
    ("together", "a b", 2, None),
])  # fmt: skip
def test_odd_but_whole_answers(url, script, text, pieces, tokens):
    """The role's empty delta is no first token; the usage message, wherever it stands, gives the count."""
    found = answer(url, script)
    assert (found.error, found.text, found.pieces, found.tokens) == (None, text, pieces, tokens)
    assert found.notes == (["several choices; the first is counted"] if script == "several choices" else [])


def test_times_are_those_of_the_server(url):
    """Lower bounds hold on any machine: a piece cannot arrive before it was sent."""
    found = answer(url, "pace 0.1 0.02 6")
    assert found.error is None and found.tokens == found.pieces == 6
    assert found.ttft_ms >= 100 and found.end_to_end_ms >= 200 and found.arrivals == sorted(found.arrivals)


def test_times_count_from_the_moment_that_was_due(url):
    """A client that is late, and counts from its own start, hides the wait that a user had (coordinated omission)."""
    found = answer(url, "pace 0.0 0.0 2", due=time.perf_counter() - 5)
    assert found.ttft_ms > 5000 and found.tpot_ms < 5000


def test_time_per_token_goes_by_the_servers_count():
    """Seven tokens in two pieces: the pieces' distance is that of six tokens."""
    found = Answer(due=0.0, arrivals=[1.0, 1.6], tokens=7)
    assert found.tpot_ms == pytest.approx(100)
    assert Answer(due=0.0, arrivals=[1.0]).tpot_ms is None


def test_answers_of_one_session_share_no_connection(url):
    """llama.cpp closes a connection behind each stream and offers to keep it: the next request on it was lost."""

    async def ten() -> list[Answer]:
        async with one_each() as session:
            return [await ask(session, url, MESSAGES, model="closes behind", max_tokens=5) for _ in range(10)]

    assert [found.error for found in asyncio.run(ten())] == [None] * 10


# -- bad ones --


@pytest.mark.parametrize("script, words", [
    ("500", r"HTTP 500: out of \\x1b\[31mslots"), ("no stream", "content type 'application/json'"),
    ("dies", "ended"), ("no end", "broke off after 2 pieces"), ("not json", "not JSON: '{oops'"),
    ("not utf-8", "not UTF-8"), ("a list", "makes no sense"), ("says error", "out of memory"), ("no text", "no text"),
])  # fmt: skip
def test_a_bad_servers_answers_say_why(url, script, words):
    import re

    found = answer(url, script)
    assert re.search(words, found.error), found.error


def test_a_stream_that_stalls_is_given_up(url):
    found = answer(url, "stalls", stall_s=0.3)
    assert found.error == "stalled: nothing came for 0.3 s" and found.pieces == 1


def test_no_server_and_no_tls_are_sentences(url):
    port = servers.free_port()
    assert "is the server up" in answer(f"http://127.0.0.1:{port}", "no usage").error
    assert "TLS" in answer(url.replace("http:", "https:"), "no usage").error


@pytest.mark.parametrize("wrong", ["localhost:8000", "ftp://host", "http://", "", None])
def test_an_address_without_its_scheme_is_refused(wrong):
    with pytest.raises(ValueError, match="expected one like"):
        check_url(wrong)
    assert check_url("http://host:1/v1/") == "http://host:1"


# -- a load --


def run_load(url, script, **options) -> load.LoadResult:
    wanted = dict(rate=200.0, requests=20, model=script, max_tokens=5) | options
    return asyncio.run(load.open_load(url, [MESSAGES], **wanted))


def test_an_open_load_sends_at_its_own_moments(url):
    """Requests wait for no answer: with a server that takes 0.3 s each, 20 at 200 a second are all under way."""
    seen: list[int] = []
    found = run_load(url, "pace 0.3 0.0 3", progress=seen.append)
    assert len(found.whole) == 20 and seen == list(range(1, 21))
    due = np.array([answer.due for answer in found.answers])
    assert np.allclose(np.diff(due), np.diff(load.arrivals(200.0, 20)))
    assert (due[-1] - due[0]) < 0.3 <= min(answer.ttft_ms for answer in found.answers) / 1e3
    assert found.tokens_per_second == pytest.approx(60 / found.seconds)


def test_failures_are_counted_and_enter_no_figure(url):
    found = run_load(url, "dies")
    assert found.whole == [] and sum(found.errors().values()) == 20
    assert found.quantiles("ttft_ms") == {} and found.goodput == 0 and "20 failed" in found.report()
    assert len(json.loads(json.dumps(found.record()))["requests"]) == 20


def test_goodput_counts_what_keeps_both_limits():
    """Just met is met; a fast start with a slow pace is not good."""

    def made(first, pace, error=None):
        return Answer(due=0.0, sent=0.0, arrivals=[first, first + pace], error=error)

    answers = (made(1.0, 0.1), made(1.001, 0.1), made(1.0, 0.101), made(0.5, 0.05), made(0.5, 0.05, error="x"))
    found = load.LoadResult(1.0, answers, seconds=4.0, limits_ms=(1000.0, 100.0 + 1e-9))
    assert found.goodput == pytest.approx(2 / 4)


def test_a_late_client_raises_an_alarm():
    """A client that cannot keep its own pace measures itself."""
    found = load.LoadResult(1.0, (Answer(due=0.0, sent=0.02, arrivals=[0.03]),), 1.0, (1000.0, 100.0))
    assert "ALARM: the client was 20.0 ms late" in found.report()
    assert "pieces of text were counted" in found.report()


@pytest.mark.parametrize("wrong", [dict(rate=0), dict(rate=float("nan")), dict(requests=0), dict(rate="5")])
def test_a_load_that_makes_no_sense_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        load.arrivals(**(dict(rate=1.0, requests=5) | wrong))


def test_arrivals_are_a_seeded_poisson_process():
    gaps = np.diff(load.arrivals(10.0, 20_000, seed=3))
    assert abs(gaps.mean() - 0.1) < 0.005 and abs(gaps.std() - 0.1) < 0.005
    assert (load.arrivals(10.0, 50, seed=1) == load.arrivals(10.0, 50, seed=1)).all()


# -- a server of one's own --


def test_a_server_is_ended_even_if_the_block_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), servers.serving(SCRIPTED, tmp_path / "log") as address:
        port = int(address.rpartition(":")[2])
        1 / 0  # noqa: B018
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_does_not_come_up_says_its_last_words(tmp_path):
    script = "import sys; print('no model in\\x1b[0m here'); sys.exit(3)"
    with pytest.raises(servers.ServerFailed, match=r"code 3: no model in\\x1b\[0m here"):
        with servers.serving([sys.executable, "-c", script], tmp_path / "log"):
            pass
    with pytest.raises(servers.ServerFailed, match=r"within 0\.5 s: it printed nothing"):
        with servers.serving([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", limit_s=0.5):
            pass


def test_a_port_that_is_taken_is_named(tmp_path, url):
    port = int(url.rpartition(":")[2])
    with pytest.raises(servers.ServerFailed, match=f"port {port} is taken"):
        with servers.serving(SCRIPTED, tmp_path / "log", port=port):
            pass


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_a_servers_children_end_with_it(tmp_path):
    """Servers start workers; one that outlives its server keeps the port and the memory."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, {SCRIPTED[1]!r}, sys.argv[1]])"
    with servers.serving([sys.executable, "-c", script, "{port}"], tmp_path / "log") as address:
        port = int(address.rpartition(":")[2])
    deadline = time.monotonic() + 60  # it was killed; the system may take a moment to close its port
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)
    pytest.fail("the server's child still listens")


@pytest.mark.skipif(os.name != "posix", reason="the leash is a shell at a pipe")
def test_a_server_ends_with_a_parent_that_is_killed(tmp_path):
    """A notebook's kernel that is killed runs no `finally`: its servers would keep memory and port for good."""
    script = (
        "import sys, pathlib, time; from every_millisecond.serving.servers import serving\n"
        f"with serving({SCRIPTED!r}, pathlib.Path(sys.argv[1])) as url: print(url, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    port = int(parent.stdout.readline().rpartition(":")[2])
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)
    pytest.fail("the server outlived its parent")


def test_a_servers_environment_is_its_own(tmp_path):
    script = "import os, sys; sys.exit('offline: ' + os.environ['HF_HUB_OFFLINE'])"
    with pytest.raises(servers.ServerFailed, match="offline: 1"):
        with servers.serving(
            [sys.executable, "-c", script], tmp_path / "log", environment=os.environ | {"HF_HUB_OFFLINE": "1"}
        ):
            pass


# -- the command --


def test_several_rates_are_measured_and_stored(url, tmp_path):
    seen = []
    found = report.run(url, rates=(100, 200), requests=5, max_tokens=5, model="usage last",
                       progress=lambda *words: seen.append(words))  # fmt: skip
    assert [result.rate for result in found] == [100, 200] and all(len(result.whole) == 5 for result in found)
    assert seen[-1] == ("200 requests/s", 5, 5)
    data, picture = report.write(url, found, tmp_path)
    stored = json.loads(data.read_text())
    assert [len(entry["requests"]) for entry in stored["loads"]] == [5, 5] and picture.stat().st_size > 1000
    named, _ = report.write(url, found, tmp_path, "Scripted, 2 slots")
    assert named.name.endswith("-scripted-2-slots-load.json")
    lines = report.stored_lines(tmp_path)
    assert len(lines) == 6 and any("Scripted, 2 slots" in line for line in lines)
    assert sum("5 of 5 whole; TTFT p50" in line for line in lines) == 4
    assert "no stored run" in report.stored_lines(tmp_path / "empty")[0]


def test_no_question_comes_again_soon():
    """A server that keeps prompts would answer six questions from its cache, over and over."""
    assert len(set(report.QUESTIONS)) == len(report.QUESTIONS) >= 48


def test_a_server_that_cannot_be_measured_says_why_before_the_load(url):
    """A thousand failed requests tell nobody more than one."""
    with pytest.raises(RuntimeError, match="the first request failed: HTTP 500"):
        report.run(url, rates=(1,), requests=1, max_tokens=5, model="500")
    with pytest.raises(RuntimeError, match="names no model"):
        report.run(url, rates=(1,), requests=1, max_tokens=5)
    with pytest.raises(RuntimeError, match="no server answers"):
        report.run(f"http://127.0.0.1:{servers.free_port()}", rates=(1,), requests=1, max_tokens=5)
    with pytest.raises(ValueError, match="rates is empty"):
        report.run(url, rates=(), requests=1, max_tokens=5, model="usage last")
    with pytest.raises(ValueError, match="expected one like"):
        report.run("localhost:1", rates=(1,), requests=1, max_tokens=5)


def test_the_command_line(url, tmp_path):
    """A learner's own server, from the shell: figures, the stored times, and one sentence for what is wrong."""
    runner = CliRunner()
    words = ["load", url, "--requests", "4", "--rates", "50,100", "--model", "no usage", "--out", str(tmp_path)]
    done = runner.invoke(app, words)
    assert done.exit_code == 0 and done.output.count("4 of 4 whole") == 2 and "pieces of text" in done.output
    assert len(list(tmp_path.glob("*-load.json"))) == 1
    for wrong, words in (
        (["load", "localhost:1"], "http://localhost:8000"),
        (["load", url, "--rates", "a"], "--rates 'a'"),
        (["load", url, "--model", "dies"], "first request failed"),
    ):
        done = runner.invoke(app, wrong)
        assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output


@pytest.mark.long
def test_the_clients_check_reports_both_clocks():
    """`tools/check_load_client.py` must match the client's requests with the server's notes, none left over."""
    tool = Path(__file__).resolve().parents[1] / "tools" / "check_load_client.py"
    command = [sys.executable, str(tool), "--rate", "50", "--requests", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 of 5 whole" in done.stdout and "a token by the server's clock" in done.stdout
