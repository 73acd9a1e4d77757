"""`samebits launch`: unmodified scripts give one hash wherever their ranks run, and after any kill."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.foreign.forms import FOLDER
from tests.runs import own_port, running, samebits, start, wait_until

LAUNCHED = FOLDER / "launched"


def sha256(text: str) -> str:
    (found,) = re.findall(r"steps done; weights sha256 (\w{64})$", text, re.MULTILINE)
    return found


def launch(cwd: Path, *arguments: object, code: int = 0) -> str:
    done = samebits("launch", *arguments, cwd=cwd, code=code)
    return done.stdout + done.stderr


def launch_on(shares: tuple[int, ...], cwd: Path, *arguments: object) -> str:
    """One launcher for each share of the ranks, as on as many machines; what the first one prints."""
    flags = ["--ranks", ",".join(map(str, shares)), "--rdzv-endpoint", f"127.0.0.1:{own_port()}"]
    started = [start("launch", *flags, "--node-rank", node, *arguments, cwd=cwd) for node in range(len(shares))]
    texts = ["".join(process.communicate(timeout=180)) for process in started]
    assert not any(process.returncode for process in started), texts
    return texts[0]


SCRIPTS = [
    ("imagenet", "--epochs", 1),
    ("spawned",),
    ("batch_norm", "norm"),
    ("batch_norm", "hook"),
    ("carried", "counter"),
    ("collective", "gradients"),
    ("collective", "gathered"),
    ("numbered", "counter"),
    ("no_loader",),
    ("batch_of_rank_zero",),
    ("ema_by_hand", "copy"),
    ("accumulation", 48, 1, "average.pt"),
    ("tutorial", 1, "snapshot.pt"),
]


@pytest.mark.parametrize("script", SCRIPTS[2:4])
def test_two_launchers_share_the_ranks_with_the_bits_of_one(tmp_path: Path, script: tuple[object, ...]) -> None:
    command = (LAUNCHED / f"{script[0]}.py", *script[1:])
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one = launch(tmp_path / "one", "--as", 3, *command)
    assert sha256(one) == sha256(launch_on((2, 1), tmp_path / "two", *command))


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.one_in(3)
def test_every_script_has_one_hash_in_every_placement(tmp_path: Path, script: tuple[object, ...]) -> None:
    command = (LAUNCHED / f"{script[0]}.py", *script[1:])
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    hashes = {sha256(launch(tmp_path / str(number), "--as", 4, *command)) for number in range(2)}
    hashes.add(sha256(launch_on((3, 1), tmp_path / "2", *command)))
    assert len(hashes) == 1


def test_what_a_script_draws_without_a_seed_follows_the_seed_of_the_launch(tmp_path: Path) -> None:
    draws = (LAUNCHED / "draws.py", 1)
    one, again, other = (
        sha256(launch(tmp_path, "--as", 2, "--seed", seed, *draws, tmp_path / f"{number}.pt", 0))
        for number, seed in enumerate((5, 5, 6))
    )
    assert one == again != other


def test_a_script_of_one_process_runs_as_one_rank_and_the_lines_of_exact_are_printed(tmp_path: Path) -> None:
    several = launch(tmp_path, "--as", 3, LAUNCHED / "gan.py")
    assert "it runs again as one rank" in several
    assert "samebits.exact(model, optimizer, loader, global_batch=64, micro_batch=16)" in several
    assert several.count("steps done") == 1
    assert sha256(several) == sha256(launch(tmp_path, LAUNCHED / "gan.py"))


def test_a_script_of_one_process_runs_once_on_two_machines(tmp_path: Path) -> None:
    flags = ["--ranks", "1,1", "--rdzv-endpoint", f"127.0.0.1:{own_port()}"]
    started = [start("launch", *flags, "--node-rank", node, LAUNCHED / "gan.py", cwd=tmp_path) for node in (0, 1)]
    texts = ["".join(process.communicate(timeout=180)) for process in started]
    assert [process.returncode for process in started] == [0, 0], texts
    assert [text.count("steps done") for text in texts] == [1, 0]


def test_only_rank_0_prints_unless_asked(tmp_path: Path) -> None:
    script = (LAUNCHED / "tutorial.py", 1, "x.pt")
    assert "[1] Epoch 0" not in launch(tmp_path, "--as", 2, *script)
    Path(tmp_path / "x.pt").unlink()
    text = launch(tmp_path, "--as", 2, "--tee", 3, "--log-dir", "logs", *script)
    assert "[rank1]: [1] Epoch 0" in text
    assert "[rank0]: [0] Epoch 0" in text
    assert "[1] Epoch 0" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_an_error_of_a_rank_is_printed_once(tmp_path: Path) -> None:
    text = launch(tmp_path, "--as", 3, LAUNCHED / "fails.py", "error", code=1)
    assert text.count("ValueError: no such class") == 1
    assert "rank 1 (host" in text


@pytest.mark.parametrize(("name", "what"), [("world", "init_process_group()"), ("spawn", "mp.spawn()")])
def test_a_script_with_a_number_of_its_own_is_told_how_to_start(tmp_path: Path, name: str, what: str) -> None:
    text = launch(tmp_path, "--as", 2, LAUNCHED / "fails.py", name, code=2)
    size = re.search(r"Start it with --as (\d)", text)
    assert f"{what} asks for" in text
    assert (size is not None and size[1] == "5") or name == "world"


def test_a_script_whose_own_processes_form_the_group_is_refused_and_not_left_waiting(tmp_path: Path) -> None:
    text = launch(tmp_path, "--as", 2, LAUNCHED / "fails.py", "children", code=2)
    assert "the script calls init_process_group() in processes that it starts itself" in text
    assert "no optimizer has made a step" not in text


def test_a_dry_run_shows_the_sizes_that_the_script_has(tmp_path: Path) -> None:
    text = launch(tmp_path, "--as", 3, "--dry-run", LAUNCHED / "batch_norm.py", "norm")
    assert "batch size    4 a rank, 12 samples a step over 3 ranks" in text
    assert "learning rate 0.1 (SGD)" in text
    assert "steps done" not in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_ranks_with_one_line(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = ("launch", "--as", 2, LAUNCHED / "draws.py", 99, tmp_path / "x.pt", 0.05)
    with running(*command, cwd=tmp_path) as process:
        wait_until((tmp_path / "x.pt").exists)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 2  # the start, and the stop


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("end", ["stop", "interrupt", "lost rank"])
def test_the_end_of_ranks_is_that_of_their_loaders_workers(tmp_path: Path, end: str) -> None:
    with running("launch", "--as", 2, LAUNCHED / "draws.py", 99, tmp_path / "x.pt", 60, cwd=tmp_path) as process:
        wait_until(lambda: len(loader_workers(process)) == 2)
        workers = loader_workers(process)
        for worker in workers:
            worker.suspend()  # it cannot notice the end of its rank, as on a busy machine
        if end == "lost rank":
            workers[1].parent().kill()
        else:
            process.send_signal(signal.SIGTERM if end == "stop" else signal.SIGINT)
        assert process.wait(60) != 0
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


def loader_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that ranks have started: each rank leads a session."""
    ranks = [each for each in descendants(process) if os.getsid(each.pid) == each.pid]
    return [worker for rank in ranks for worker in rank.children()]


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with running("launch", "--as", 2, LAUNCHED / "draws.py", 99, tmp_path / "x.pt", 0.05, cwd=tmp_path) as process:
        wait_until((tmp_path / "x.pt").exists)
        ranks = descendants(process)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive


@pytest.mark.parametrize("wait_s", [2, 60])
def test_a_worker_that_is_still_starting_ends_with_its_rank(tmp_path: Path, wait_s: int) -> None:
    with running("launch", "--as", 2, LAUNCHED / "slow_worker.py", tmp_path, wait_s, cwd=tmp_path) as process:
        wait_until(lambda: len([*tmp_path.glob("*.pid")]) == 2)
        workers = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("*.pid")]
        for each in [*(worker.parent() for worker in workers), psutil.Process(process.pid)]:
            each.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive


def kill_often(tmp_path: Path, times: int, seed: int) -> None:
    """Kill launcher and ranks at random moments until the script ends; compare with an undisturbed run."""
    moments = random.Random(seed)
    command = ("launch", "--as", 2, LAUNCHED / "draws.py", 4)
    undisturbed = launch(tmp_path, *command[1:], tmp_path / "whole.pt", 0)
    whole = sha256(undisturbed)
    (printed,) = re.findall(r"^sha256 \w{64}$", undisturbed, re.MULTILINE)
    for number in range(times):
        path = tmp_path / f"{number}.pt"
        with running(*command, path, 0.1, cwd=tmp_path) as process:
            wait_until(path.exists)
            ranks = descendants(process)
            time.sleep(moments.random() * 3)
            for each in [*ranks, psutil.Process(process.pid)]:
                if each.is_running():
                    each.kill()
        resumed = launch(tmp_path, *command[1:], path, 0)
        # Killed behind its last step, the script has none left: what it prints itself is compared.
        assert printed in resumed
        assert "no optimizer has made a step" in resumed or sha256(resumed) == whole


def test_a_killed_script_goes_on_with_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    kill_often(tmp_path, 2, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [12, pytest.param(30, marks=pytest.mark.lab)])
def test_kills_at_random_moments_change_no_bit(tmp_path: Path, kills: int) -> None:
    kill_often(tmp_path, kills, seed=2)


def test_a_lost_rank_restarts_all_where_restarts_are_left(tmp_path: Path) -> None:
    command = ("launch", "--as", 2, "--max-restarts", 1, LAUNCHED / "draws.py", 3)
    whole = sha256(launch(tmp_path, *command[1:], tmp_path / "whole.pt", 0))
    with running(*command, tmp_path / "x.pt", 0.1, cwd=tmp_path) as process:
        wait_until((tmp_path / "x.pt").exists)
        rank = next(each for each in descendants(process) if each.num_threads() > 2)
        rank.kill()
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "restart 1 of 1" in errors
    assert sha256(out + errors) == whole


def test_a_lost_rank_is_named_with_a_command_that_there_is(tmp_path: Path) -> None:
    with running("launch", "--as", 2, LAUNCHED / "draws.py", 99, tmp_path / "x.pt", 0.1, cwd=tmp_path) as process:
        wait_until((tmp_path / "x.pt").exists)
        next(each for each in descendants(process) if each.num_threads() > 2).kill()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 4
    assert "was killed by signal 9 (SIGKILL)" in errors
    assert "Start the same command again; --max-restarts N does so automatically." in errors


def test_a_script_for_gpus_runs_on_cpus_where_it_is_asked_to(tmp_path: Path) -> None:
    assert "no CUDA device" in launch(tmp_path, "--as", 3, LAUNCHED / "gpus.py", code=1)
    one = launch(tmp_path, "--as", 3, "--cuda-on-cpu", LAUNCHED / "gpus.py")
    assert "0 bytes of cpu" in one
    assert sha256(one) == sha256(launch_on((2, 1), tmp_path, "--cuda-on-cpu", LAUNCHED / "gpus.py"))


def test_weights_that_a_script_does_not_initialize_are_seen_in_its_loss(tmp_path: Path) -> None:
    text = launch(tmp_path, "--as", 2, LAUNCHED / "uninitialized.py")
    assert "loss nan" in text
    assert "3 of 4 weights and buffers have values that are not finite, first 0.weight" in text


def test_a_script_that_finds_no_gpu_is_told_the_flag(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import torch\ntorch.ones(2).cuda()\n")
    assert "samebits launch --cuda-on-cpu" in launch(tmp_path, "--as", 2, "needs.py", code=1)


def test_a_resume_without_the_optimizers_state_is_named(tmp_path: Path) -> None:
    script = (LAUNCHED / "tutorial.py", 3, "x.pt")
    launch(tmp_path, "--as", 2, LAUNCHED / "tutorial.py", 2, "x.pt")
    assert "training begins with epoch 1 without the optimizer's state" in launch(tmp_path, "--as", 2, *script)


def test_files_in_the_current_folder_replace_no_module(tmp_path: Path) -> None:
    for name in ("torch", "random", "samebits"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')\n")
    assert sha256(launch(tmp_path, "--as", 2, LAUNCHED / "batch_norm.py", "hook"))


@pytest.mark.full
def test_check_compares_placements_and_names_what_differs(tmp_path: Path) -> None:
    checked = samebits("check", "--as", 2, LAUNCHED / "draws.py", "--", 2, tmp_path / "none" / "x.pt", 0, cwd=tmp_path)
    assert "two launchers, 1 + 1" in checked.stdout
    script = (LAUNCHED / "batch_norm.py").read_text().replace("0.1)", "time.time() % 1)")
    (tmp_path / "by_time.py").write_text(f"import sys, time\nsys.path.append({str(LAUNCHED)!r})\n{script}")
    found = samebits("check", "--as", 2, "by_time.py", "--", "hook", cwd=tmp_path, code=1)
    assert "0.weight differs after step 0 on one launcher again" in found.stdout


@pytest.mark.full
def test_check_says_that_a_script_makes_too_few_steps(tmp_path: Path) -> None:
    found = samebits("check", "--as", 3, LAUNCHED / "batch_norm.py", "--", "hook", cwd=tmp_path, code=2)
    assert "on one launcher failed, or made fewer than 6 steps" in found.stderr
