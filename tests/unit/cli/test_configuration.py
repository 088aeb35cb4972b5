"""Where values come from, and the file that keeps them."""

import json
from pathlib import Path

import pytest

from penstock.cli import local, profiles
from penstock.cli.errors import CliError
from penstock.cli.profiles import ConfigFile, Profile
from penstock.cli.resolve import Flags, Resolved, resolve


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PENSTOCK_DATA": str(tmp_path / "data")}


def store(environ: dict[str, str], **named: Profile) -> None:
    profiles.write(profiles.config_path(environ), ConfigFile(named))


def start_instance(environ: dict[str, str], api: str = "http://127.0.0.1:8080") -> None:
    folder = Path(environ["PENSTOCK_DATA"])
    folder.mkdir()
    values = {"api": api, "gateway": "http://127.0.0.1:8081", "key": "psk_local", "pid": 1}
    (folder / "instance.json").write_text(json.dumps(values))


def found(resolved: Resolved) -> dict[str, tuple[str, str] | None]:
    names = ("api_url", "gateway_url", "key", "project")
    values = {name: getattr(resolved, name) for name in names}
    return {name: value and (value.text, value.source.split(" in ")[0]) for name, value in values.items()}


def test_flag_then_environment_then_profile_then_local_instance(environ: dict[str, str]) -> None:
    start_instance(environ)
    assert found(resolve(Flags(), environ)) == {
        "api_url": ("http://127.0.0.1:8080", "local instance"),
        "gateway_url": ("http://127.0.0.1:8081", "local instance"),
        "key": ("psk_local", "local instance"),
        "project": None,
    }
    store(environ, default=Profile("https://a.example", "https://g.example", "psk_stored", "prj_default"))
    assert found(resolve(Flags(), environ)) == {
        "api_url": ("https://a.example", "profile default"),
        "gateway_url": ("https://g.example", "profile default"),
        "key": ("psk_stored", "profile default"),
        "project": ("prj_default", "profile default"),
    }
    environ |= {"PENSTOCK_API_URL": "https://b.example/", "PENSTOCK_API_KEY": "psk_env", "PENSTOCK_PROJECT": "prj_env"}
    assert found(resolve(Flags(), environ)) == {
        "api_url": ("https://b.example", "environment PENSTOCK_API_URL"),
        "gateway_url": None,
        "key": ("psk_env", "environment PENSTOCK_API_KEY"),
        "project": ("prj_env", "environment PENSTOCK_PROJECT"),
    }
    flagged = found(resolve(Flags(api_url="https://c.example", project="prj_flag"), environ))
    assert flagged["api_url"] == ("https://c.example", "flag --api-url")
    assert flagged["project"] == ("prj_flag", "flag --project")


@pytest.mark.parametrize("stored", [True, False])
def test_a_stored_key_goes_only_where_it_was_stored_for(environ: dict[str, str], *, stored: bool) -> None:
    start_instance(environ)
    if stored:
        store(environ, default=Profile("https://a.example", None, "psk_stored"))
    assert resolve(Flags(api_url="https://evil.example"), environ).key is None
    own = "https://a.example/api/v1/" if stored else "http://127.0.0.1:8080/"
    assert resolve(Flags(api_url=own), environ).key is not None


def test_an_empty_variable_counts_as_unset(environ: dict[str, str]) -> None:
    start_instance(environ)
    environ |= dict.fromkeys(("PENSTOCK_API_URL", "PENSTOCK_API_KEY", "PENSTOCK_PROJECT", "PENSTOCK_PROFILE"), "")
    environ["PENSTOCK_CONFIG_FILE"] = ""
    assert found(resolve(Flags(), environ))["key"] == ("psk_local", "local instance")


def test_profiles_are_chosen_by_flag_variable_and_file(environ: dict[str, str]) -> None:
    path = profiles.config_path(environ)
    named = {name: Profile(f"https://{name}.example", None, f"psk_{name}") for name in ("one", "two", "three")}
    profiles.write(path, ConfigFile(named, "one"))
    assert found(resolve(Flags(), environ))["key"] == ("psk_one", "profile one")
    environ["PENSTOCK_PROFILE"] = "two"
    assert found(resolve(Flags(), environ))["key"] == ("psk_two", "profile two")
    assert found(resolve(Flags(profile="three"), environ))["key"] == ("psk_three", "profile three")
    with pytest.raises(CliError, match="one, two, three"):
        resolve(Flags(profile="four"), environ)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    strange = Profile('https://x/"quoted"', None, "psk_\\back\u00e9\U0001f600\x7f", "prj_default")
    profiles.write(path, ConfigFile({"a-b_C": strange}, "a-b_C"))
    assert profiles.read(path) == ConfigFile({"a-b_C": strange}, "a-b_C")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [item.name for item in path.parent.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    "text",
    [
        "profiles = 1",
        "current_profile = 1",
        "[profiles]\na = 1",
        "[profiles.a]\nkey = 1",
        "[profiles.a]\nkye = 'psk_x'",
        "[profiles.a",
        "\ufffd\x00",
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(CliError, match=str(path)):
        profiles.read(path)


def test_the_data_folder_is_beside_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    assert local.data_folder(None, {}) == tmp_path / ".penstock"
    assert local.data_folder(None, {"PENSTOCK_DATA": "/srv/p"}) == Path("/srv/p")
    assert local.data_folder("/flag", {"PENSTOCK_DATA": "/srv/p"}) == Path("/flag")
    monkeypatch.setattr("sys.prefix", "/usr")
    assert local.data_folder(None, {"HOME": "/home/me"}) == Path("/home/me/.local/share/penstock")
    assert local.data_folder(None, {"HOME": "/home/me", "XDG_DATA_HOME": "/data"}) == Path("/data/penstock")
    with pytest.raises(CliError, match="HOME"):
        local.data_folder(None, {})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"api": 1}', '{"api": "http://x", "gateway": "http://x", "pid": 1}'])
def test_a_damaged_instance_file_is_no_instance(tmp_path: Path, text: str) -> None:
    (tmp_path / "instance.json").write_text(text)
    assert local.instance(tmp_path) is None
