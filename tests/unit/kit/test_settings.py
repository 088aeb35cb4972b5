"""Settings come from file and environment, and errors name what is wrong."""

from pathlib import Path

import msgspec
import pytest

from penstock.kit.errors import Invalid
from penstock.kit.settings import load


class Sample(msgspec.Struct, frozen=True):
    database_url: str = "none"
    port: int = 8080
    fast: bool = False


def test_the_environment_wins_over_the_section_which_wins_over_shared_values(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('database_url = "shared"\n[api]\nport = 1\n[gateway]\nport = 3\n')
    environ = {"PENSTOCK_CONFIG": str(file), "PENSTOCK_API_FAST": "true"}
    assert load(Sample, "api", environ) == Sample("shared", 1, fast=True)
    assert load(Sample, "api", environ | {"PENSTOCK_API_PORT": "2"}).port == 2
    assert load(Sample, "api", environ | {"PENSTOCK_DATABASE_URL": "env"}).database_url == "env"


def test_a_variable_that_is_set_but_empty_counts_as_unset() -> None:
    assert load(Sample, "api", {"PENSTOCK_API_PORT": "", "PENSTOCK_CONFIG": ""}) == Sample()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[api]\nprot = 1\n", r"unknown setting api\.prot; did you mean port\?"),
        ("[gatway]\nport = 1\n", r"unknown setting gatway; did you mean gateway\?"),
        ("databse_url = 'x'\n", r"unknown setting databse_url; did you mean database_url\?"),
        ("zzz = 1\n", "unknown setting zzz$"),
        ("api = 1\n", r"api must be a section: write \[api\]"),
        ("[api]\nport = 'many'\n", "port"),
        ("[api\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    with pytest.raises(Invalid, match=expected):
        load(Sample, "api", {"PENSTOCK_CONFIG": str(file)})


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(Invalid, match="cannot read"):
        load(Sample, "api", {"PENSTOCK_CONFIG": "nowhere.toml"})


class Needy(msgspec.Struct, frozen=True):
    database_url: str
    token: str


@pytest.mark.parametrize(
    ("environ", "variable"),
    [({}, "PENSTOCK_DATABASE_URL"), ({"PENSTOCK_DATABASE_URL": "x"}, "PENSTOCK_API_TOKEN")],
)
def test_a_missing_setting_is_named_with_its_variable(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(Invalid, match=f"is missing: set {variable}"):
        load(Needy, "api", environ)
