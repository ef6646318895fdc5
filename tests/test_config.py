"""Settings (A15): what is set is in force, and what cannot be is refused by name, never ignored."""

from dataclasses import fields
from pathlib import Path

import pytest

from retain import config
from retain.address import parse_tier
from retain.config import Settings, resolve
from retain.errors import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder, so that the settings of whoever runs the tests do not count."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_anything_set_the_defaults_hold(home):
    found = resolve(environment={})
    assert found.settings == Settings()
    assert set(found.sources.values()) == {"default"}


def test_every_setting_has_a_reader_and_a_source(home):
    names = [field.name for field in fields(Settings)]
    assert list(config._FIELDS) == names
    assert list(resolve(environment={}).sources) == names


def test_a15_flags_beat_variables_beat_the_file_beats_defaults(home):
    file = write(home / "retain.yaml", "port: 1\naudit: 0.5\npolicy: lru\n")
    found = resolve({"port": 3}, {"RETAIN_PORT": "2", "RETAIN_AUDIT": "0.25"}, file)
    assert (found.settings.port, found.settings.audit, found.settings.policy) == (3, 0.25, "lru")
    assert found.settings.model == "smollm2"
    assert found.sources["port"] == "flag --port"
    assert found.sources["audit"] == "RETAIN_AUDIT"
    assert found.sources["policy"] == f"file {file}"
    assert found.sources["model"] == "default"


def test_flags_that_were_not_given_hide_nothing(home):
    found = resolve({"port": None, "tiers": []}, {"RETAIN_PORT": "2", "RETAIN_TIERS": "memory:1MiB"})
    assert found.settings.port == 2
    assert found.settings.tiers == (parse_tier("memory:1MiB"),)


def test_tiers_are_read_from_the_file_and_from_a_variable(home):
    file = write(home / "retain.yaml", "tiers:\n  - memory:4GiB\n  - disk:/kv?capacity=5GB&codec=lossless\n")
    expected = (parse_tier("memory:4GiB"), parse_tier("disk:/kv?capacity=5GB&codec=lossless"))
    assert resolve(environment={}, file=file).settings.tiers == expected
    text = "memory:4GiB, disk:/kv?capacity=5GB&codec=lossless"
    assert resolve(environment={"RETAIN_TIERS": text}).settings.tiers == expected


def test_the_default_file_is_read_where_it_exists(home):
    file = write(home / ".config/retain/config.yaml", "port: 99\n")
    found = resolve(environment={})
    assert found.settings.port == 99
    assert found.sources["port"] == f"file {file}"


def test_the_file_may_be_named_by_a_variable(home):
    file = write(home / "mine.yaml", "port: 98\n")
    assert resolve(environment={"RETAIN_CONFIG": str(file)}).settings.port == 98


def test_an_empty_file_sets_nothing(home):
    assert resolve(environment={}, file=write(home / "empty.yaml", "# nothing\n")).settings == Settings()


@pytest.mark.parametrize(
    "name", [{"file": Path("absent.yaml")}, {"environment": {"RETAIN_CONFIG": "absent.yaml"}}]
)
def test_a15_a_named_file_that_is_missing_is_refused(home, name):
    with pytest.raises(ConfigError, match=r"absent.yaml named by (--config|RETAIN_CONFIG) does not exist"):
        resolve(**{"environment": {}, **name})


def test_a15_a_file_that_cannot_be_read_is_refused(home):
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(environment={}, file=home)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tier: [memory:1GiB]", "unknown key 'tier'.*did you mean tiers"),
        ("polcy: lru", "unknown key 'polcy'.*did you mean policy"),
        ("12: lru", "unknown key 12"),
        ("tiers: memory:1GiB", "tiers in .*'memory:1GiB' is not a list of tier addresses"),
        ("tiers: [17]", "is not a list of tier addresses"),
        ("tiers: [memory:4Gb]", "tiers in .*unknown unit 'Gb'"),
        ("tiers: [memory:1GiB, memory:2GiB]", "two tiers lie in the same place, memory"),
        ("tiers: ['disk:/a', 'disk:/a?capacity=1GB']", "two tiers lie in the same place, /a"),
        ("policy: lru-leave", "'lru-leave' is not a policy.*did you mean lru-leaf"),
        ("policy: true", "True is not a policy"),
        ("audit: 1.5", "audit in .*1.5 is not a share"),
        ("audit: '0.5'", "'0.5' is not a share"),
        ("audit: .nan", "nan is not a share"),
        ("port: 70000", "70000 is not a port"),
        ("port: yes", "True is not a port"),
        ("port: '8000'", "'8000' is not a port"),
        ("model: 7", "7 is not a text"),
        ("api_keys: secret", "api_keys in .*: the API keys are not a list of NAME=KEY texts$"),
        ("port: 1\nport: 2", "'port' is given twice"),
        ("[1, 2]", "is a list, not a mapping"),
        ("port: [", "not valid YAML"),
        ("model: !!python/object:os.system x", "not valid YAML"),
    ],
)
def test_a15_a_wrong_file_is_refused_by_name(home, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(environment={}, file=write(home / "retain.yaml", text))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RETAIN_TIER", "memory:1GiB", "RETAIN_TIER, which Retain does not know.*did you mean RETAIN_TIERS"),
        ("RETAIN_POLCY", "lru", "did you mean RETAIN_POLICY"),
        ("RETAIN_", "x", "RETAIN_, which Retain does not know"),
        ("RETAIN_PORT", "http", "RETAIN_PORT: 'http' is not a port"),
        ("RETAIN_PORT", "", "RETAIN_PORT: '' is not a port"),
        ("RETAIN_AUDIT", "1 %", "RETAIN_AUDIT: '1 %' is not a share"),
        ("RETAIN_TIERS", "memory:1", None),
        ("RETAIN_TIERS", "memory:lots", "RETAIN_TIERS: the tier 'memory:lots' has a capacity"),
    ],
)
def test_a15_a_wrong_variable_is_refused_by_name(home, variable, value, message):
    if message is None:
        assert resolve(environment={variable: value}).sources["tiers"] == variable
        return
    with pytest.raises(ConfigError, match=message):
        resolve(environment={variable: value})


def test_a15_a_wrong_flag_is_refused_by_name(home):
    with pytest.raises(ConfigError, match="--tier: the tier 'mem:1GiB' is of no known kind"):
        resolve({"tiers": ["mem:1GiB"]}, {})


def test_the_data_folder_of_benches_and_tests_is_a_known_variable(home):
    assert resolve(environment={"RETAIN_DATA": "~/traces"}).settings.data == home / "traces"
