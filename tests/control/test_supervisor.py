"""What the supervisor promises, shown on small real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvhearth.control.backoff import RestartPolicy
from kvhearth.control.child import ChildSpec
from kvhearth.control.ports import PortKeeper
from kvhearth.control.supervisor import Event, State, Supervisor
from kvhearth.errors import UserError

from .conftest import children_left, eventually, is_gone, server

QUICK = RestartPolicy(first_delay_seconds=0.05, short_life_seconds=0.0)


def answer(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
        return int(response.read())


def test_stages_start_one_after_the_other_and_stop_the_other_way_round(tmp_path: Path, ports: PortKeeper) -> None:
    order = tmp_path / "order"
    note = f"open({str(order)!r}, 'a').write"
    specs = [
        server(
            name,
            ports.take("127.0.0.1", 0, where=name),
            stage=stage,
            before=f"{note}('+{name} ')",
            on_term=f"lambda *a: ({note}('-{name} '), os._exit(0))",
        )
        for name, stage in (("router", 2), ("store", 0), ("engine", 1))
    ]
    supervisor = Supervisor(specs, tmp_path)
    supervisor.start()
    assert supervisor.wait_settled(30)
    assert all(view.state is State.READY for view in supervisor.views())
    pids = [view.pid for view in supervisor.views()]
    supervisor.stop()
    assert order.read_text().split() == ["+store", "+engine", "+router", "-router", "-engine", "-store"]
    assert all(pid is not None and is_gone(pid) for pid in pids)
    assert all(view.state is State.STOPPED and view.pid is None for view in supervisor.views())


def test_a_killed_child_is_back_at_its_port_and_its_neighbour_is_left_alone(tmp_path: Path, ports: PortKeeper) -> None:
    events: list[Event] = []
    here, there = (ports.take("127.0.0.1", 0, where="x") for _ in range(2))
    supervisor = Supervisor([server("a", here), server("b", there)], tmp_path, policy=QUICK, on_event=events.append)
    supervisor.start()
    assert supervisor.wait_settled(30)
    before, neighbour = answer(here), answer(there)
    assert before == supervisor.child("a").pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: supervisor.child("a").restarts == 1 and supervisor.child("a").state is State.READY, "restart")
    assert answer(here) == supervisor.child("a").pid != before
    assert answer(there) == neighbour
    supervisor.stop()
    assert [event.child for event in events] == ["a", "a"]
    assert "was killed by SIGKILL; restarting in 0.05 s" in events[0].message
    assert "ready again" in events[1].message


def test_a_child_that_cannot_start_fails_the_whole_start_with_its_own_words(tmp_path: Path, ports: PortKeeper) -> None:
    good = server("good", ports.take("127.0.0.1", 0, where="x"))
    said = "import sys; print('kvhearth: error: --flag: no such flag', file=sys.stderr); sys.exit(2)"
    bad = ChildSpec("bad", (sys.executable, "-c", said), "http://127.0.0.1:9/", stage=1)
    supervisor = Supervisor([good, bad], tmp_path)
    supervisor.start()
    with pytest.raises(UserError, match=r"^bad: exited with code 2 before the stack was ready: --flag: no such flag$"):
        supervisor.wait_settled(30)
    assert children_left() == []


def test_a_program_that_does_not_exist_fails_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor([ChildSpec("ghost", ("/no/such/program",), "http://127.0.0.1:9/")], tmp_path)
    supervisor.start()
    with pytest.raises(
        UserError, match=r"^ghost: exited with code 1 before the stack was ready: cannot run /no/such/program: "
    ):
        supervisor.wait_settled(30)


def test_a_child_that_never_answers_fails_the_start_at_its_deadline(tmp_path: Path, ports: PortKeeper) -> None:
    port = ports.take("127.0.0.1", 0, where="x")
    sleeper = "import time; print('loading', flush=True); time.sleep(600)"
    spec = ChildSpec("slow", (sys.executable, "-c", sleeper), f"http://127.0.0.1:{port}/", start_seconds=1.0)
    supervisor = Supervisor([spec], tmp_path)
    supervisor.start()
    with pytest.raises(UserError, match=r"^slow: not ready within 1 s .*; it last said: loading$"):
        supervisor.wait_settled(30)
    assert children_left() == []


def test_a_child_that_keeps_dying_is_reported_with_its_last_lines_and_the_rest_goes_on(
    tmp_path: Path, ports: PortKeeper
) -> None:
    events: list[Event] = []
    here, there = (ports.take("127.0.0.1", 0, where="x") for _ in range(2))
    flag = tmp_path / "broken"
    dies = f"if os.path.exists({str(flag)!r}): sys.exit('disk on fire')"
    policy = RestartPolicy(first_delay_seconds=0.01, patience=3, slow_retry_seconds=0.5)
    supervisor = Supervisor(
        [server("a", here, before=dies), server("b", there)], tmp_path, policy=policy, on_event=events.append
    )
    supervisor.start()
    assert supervisor.wait_settled(30)
    flag.touch()
    pid = supervisor.child("a").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: supervisor.child("a").state is State.FAILING, "given up")
    (given_up,) = [event for event in events if event.log_lines]
    assert "going on without it, next try in 0.5 s" in given_up.message
    assert given_up.log_lines[-1] == "disk on fire"
    assert answer(there) == supervisor.child("b").pid
    flag.unlink()
    eventually(lambda: supervisor.child("a").state is State.READY, "back after the cause is gone")
    supervisor.stop()


def test_a_child_that_hangs_in_its_restart_is_killed_and_tried_again(tmp_path: Path, ports: PortKeeper) -> None:
    events: list[Event] = []
    flag = tmp_path / "broken"
    hangs = f"import time; os.path.exists({str(flag)!r}) and time.sleep(600)"
    spec = server("a", ports.take("127.0.0.1", 0, where="x"), before=hangs)
    supervisor = Supervisor([replace(spec, start_seconds=3.0)], tmp_path, policy=QUICK, on_event=events.append)
    supervisor.start()
    assert supervisor.wait_settled(30)
    flag.touch()
    pid = supervisor.child("a").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(events) == 2, "killed once more")
    assert events[1].message == "was not ready within 3 s; restarting in 0.1 s"
    flag.unlink()
    eventually(lambda: supervisor.child("a").state is State.READY, "back")
    supervisor.stop()


def test_a_restarted_child_that_answers_not_now_is_left_to_wait_for_others(tmp_path: Path, ports: PortKeeper) -> None:
    flag = tmp_path / "alone"
    events: list[Event] = []
    port = ports.take("127.0.0.1", 0, where="x")
    spec = server("a", port)
    code = spec.argv[-1].replace("send_response(200)", f"send_response(503 if os.path.exists({str(flag)!r}) else 200)")
    spec = replace(spec, argv=(*spec.argv[:-1], code), start_seconds=2.0)
    supervisor = Supervisor([spec], tmp_path, policy=QUICK, on_event=events.append)
    supervisor.start()
    assert supervisor.wait_settled(30)
    flag.touch()
    pid = supervisor.child("a").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: supervisor.child("a").restarts == 1, "restarted")
    assert not supervisor.wait_ended(3.0)
    assert supervisor.child("a").state is State.STARTING
    assert supervisor.child("a").restarts == 1
    flag.unlink()
    eventually(lambda: supervisor.child("a").state is State.READY, "ready when the others are")
    supervisor.stop()


def test_a_child_that_ignores_sigterm_is_killed_at_the_deadline_with_what_it_started(
    tmp_path: Path, ports: PortKeeper
) -> None:
    port = ports.take("127.0.0.1", 0, where="x")
    grandchild = "import subprocess; subprocess.Popen(['sleep', '600'])"
    spec = server("stubborn", port, before=grandchild, on_term="signal.SIG_IGN")
    supervisor = Supervisor([spec], tmp_path, stop_seconds=0.3)
    supervisor.start()
    assert supervisor.wait_settled(30)
    family = children_left()
    assert len(family) == 2
    supervisor.stop()
    assert all(is_gone(member.pid) for member in family)


def test_what_a_dead_child_left_in_its_group_is_killed_too(tmp_path: Path, ports: PortKeeper) -> None:
    port = ports.take("127.0.0.1", 0, where="x")
    grandchild = "import subprocess; subprocess.Popen(['sleep', '600'])"
    supervisor = Supervisor([server("a", port, before=grandchild)], tmp_path, policy=QUICK)
    supervisor.start()
    assert supervisor.wait_settled(30)
    pid = supervisor.child("a").pid
    assert pid is not None
    (orphan,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(orphan.pid), "orphan gone")
    supervisor.stop()


def test_hurry_does_not_wait_for_an_orderly_end(tmp_path: Path, ports: PortKeeper) -> None:
    spec = server("stubborn", ports.take("127.0.0.1", 0, where="x"), on_term="signal.SIG_IGN")
    supervisor = Supervisor([spec], tmp_path, stop_seconds=600)
    supervisor.start()
    assert supervisor.wait_settled(30)
    patient = threading.Thread(target=supervisor.stop)
    patient.start()
    supervisor.stop(hurry=True)
    patient.join(10)
    assert not patient.is_alive()


def test_stopping_during_the_start_leaves_nothing(tmp_path: Path, ports: PortKeeper) -> None:
    sleeper = ChildSpec("slow", (sys.executable, "-c", "import time; time.sleep(600)"), "http://127.0.0.1:9/")
    supervisor = Supervisor([sleeper], tmp_path)
    supervisor.start()
    eventually(lambda: supervisor.child("slow").pid is not None, "started")
    supervisor.stop()
    assert children_left() == []


def test_children_outlive_the_thread_that_asked_for_them(tmp_path: Path, ports: PortKeeper) -> None:
    supervisor = Supervisor([server("a", ports.take("127.0.0.1", 0, where="x"))], tmp_path)
    asker = threading.Thread(target=lambda: (supervisor.start(), supervisor.wait_settled(30)))
    asker.start()
    asker.join()
    assert not supervisor.wait_ended(0.3)
    assert supervisor.child("a").restarts == 0
    assert supervisor.child("a").state is State.READY
    supervisor.stop()


def test_the_log_of_a_chatty_child_is_trimmed(tmp_path: Path, ports: PortKeeper) -> None:
    chatty = "sys.stdout.write('x' * 99 + '\\n'); [sys.stdout.write('y' * 99 + '\\n') for _ in range(90_000)]"
    supervisor = Supervisor([server("a", ports.take("127.0.0.1", 0, where="x"), before=chatty)], tmp_path)
    supervisor.start()
    assert supervisor.wait_settled(30)
    eventually(lambda: (tmp_path / "a.log.1").exists(), "older generation")
    eventually(lambda: (tmp_path / "a.log").stat().st_size < 1000, "emptied")
    supervisor.stop()


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path, ports: PortKeeper) -> None:
    port = ports.take("127.0.0.1", 0, where="x")
    program = f"""
import sys
from pathlib import Path
from kvhearth.control.child import ChildSpec
from kvhearth.control.supervisor import Supervisor
spec = ChildSpec("a", (sys.executable, "-c", {server("a", port).argv[-1]!r}), "http://127.0.0.1:{port}/")
supervisor = Supervisor([spec], Path({str(tmp_path)!r}))
supervisor.start()
supervisor.wait_settled(30)
print(supervisor.child("a").pid, flush=True)
supervisor.wait_ended(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: is_gone(child), "child gone")


@pytest.mark.parametrize("victim", ["supervisor", "child"])
def test_what_a_child_with_children_started_dies_with_either_of_them(
    victim: str, tmp_path: Path, ports: PortKeeper
) -> None:
    """As vLLM's engine core would live on, with all its memory, when its server or the supervisor is killed."""
    port = ports.take("127.0.0.1", 0, where="x")
    code = server("a", port, before="import subprocess; subprocess.Popen(['sleep', '600'])").argv[-1]
    program = f"""
import sys, time
from pathlib import Path
from kvhearth.control.child import ChildSpec, Process
from kvhearth.control.logs import BoundedLog
spec = ChildSpec("a", (sys.executable, "-c", {code!r}), "http://127.0.0.1:{port}/", has_children=True)
child = Process(spec, BoundedLog(Path({str(tmp_path)!r}) / "a.log"))
while child.probe() != 200:
    time.sleep(0.05)
print(child.pid, flush=True)
time.sleep(600)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    family = psutil.Process(pid).children(recursive=True)
    assert "sleep" in [member.name() for member in family]
    os.kill(supervisor.pid if victim == "supervisor" else pid, signal.SIGKILL)
    eventually(lambda: is_gone(pid) and all(is_gone(member.pid) for member in family), "the whole family gone")
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()


def test_a_guard_does_not_keep_an_orderly_end_waiting(tmp_path: Path, ports: PortKeeper) -> None:
    spec = replace(server("a", ports.take("127.0.0.1", 0, where="x")), has_children=True)
    supervisor = Supervisor([spec], tmp_path, stop_seconds=600)
    supervisor.start()
    assert supervisor.wait_settled(30)
    family = children_left()
    assert len(family) == 2
    supervisor.stop()
    eventually(lambda: all(is_gone(member.pid) for member in family), "child and guard gone")
