"""What decorating makes of functions and classes."""

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.sdk import tenant
from penstock.sdk.deploying import definition
from penstock.sdk.functions import imports
from penstock.sdk.functions.options import Cron, Options
from penstock.wire import rest

app = penstock.App("Images")


@app.function(sku="g1.1", retry_for=[ValueError, "Odd"], secrets=["db-password"], schedule=Cron("0 3 * * *"))
def resize(width: int, *, height: int = 2) -> int:
    """Makes it smaller."""
    return width * height


@app.function(sku="g1.1", name="Later")
async def wait() -> str:
    return "waited"


@app.cls(sku="g1.1", secrets={"token": "API_TOKEN"})
class Model:
    """A model."""

    def __init__(self) -> None:
        self.ready: list[str] = []

    @penstock.enter()
    def load(self) -> None:
        self.ready.append("load")

    @penstock.enter()
    async def warm(self) -> None:
        await asyncio.sleep(0)
        self.ready.append("warm")

    @penstock.method()
    def state(self) -> list[str]:
        return self.ready


def test_names_are_app_and_function_in_lower_case() -> None:
    assert [made.name for made in app] == ["images-resize", "images-later", "images-model"]
    assert resize.handler == f"{__name__}:resize"
    assert resize.__doc__ == "Makes it smaller."


def test_local_calls_run_the_code_here() -> None:
    assert resize(3) == resize.local(3) == 6
    assert asyncio.run(wait.local()) == "waited"
    assert Model().state.local() == ["load", "warm"]
    assert Model.state() == ["load", "warm"]


def test_a_class_has_its_methods_and_no_others() -> None:
    assert Model.methods == ["state"]
    with pytest.raises(AttributeError, match=r"no @penstock\.method"):
        Model().load  # noqa: B018
    with pytest.raises(ValueError, match="has no method to call"):
        penstock.App("x").cls(sku="g1.1")(type("Empty", (), {"__module__": "m"}))


def test_a_function_that_is_not_here_can_only_be_called_there() -> None:
    found = penstock.Function.lookup("Images-Resize")
    assert found.name == "images-resize"
    with pytest.raises(penstock.FunctionError, match="not here"):
        found.local(1)
    with pytest.raises(penstock.FunctionError, match="no function's name"):
        penstock.Function.lookup("../x")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpus": 0}, "gpus must be 1 to 1024"),
        ({"concurrency": 1001}, "concurrency must be 1 to 1000"),
        ({"retries": True}, "retries must be 0 to 10"),
        ({"timeout_s": 10**6}, "timeout_s must be 0.001 to 86400"),
        ({"workers_min": 3, "workers_max": 2}, "workers_min is 3"),
        ({"retry_for": [1]}, "retry_for takes exceptions"),
        ({"env": {"A-B": "x"}}, "'A-B' is not the name of a variable"),
        ({"runtime": "a", "requirements": "b"}, "either runtime or requirements"),
        ({"schedule": "0 3 * * *"}, "schedule must be a penstock.Cron"),
        ({"secrets": "db-password"}, "secrets must be a list"),
        ({"requirements": {"numpy"}}, "requirements must be a list of packages or the path of a requirements file"),
        ({"requirements": [1]}, "requirements must be names of packages, not 1"),
        ({"retry_for": ValueError}, "retry_for must be a list"),
        ({"env": ["A"]}, "env must be a mapping"),
    ],
)
def test_wrong_options_are_named_when_the_file_is_read(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        app.function(sku="g1.1", **given)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="'speed'"):
        app.function(sku="g1.1", speed=3)
    with pytest.raises(TypeError, match="'sku'"):
        app.function()
    with pytest.raises(ValueError, match="five fields"):
        Cron("* * *")
    with pytest.raises(ValueError, match="cannot be a function's name"):
        penstock.App("a b")
    with pytest.raises(ValueError, match="there already"):
        app.function(sku="g1.1", name="resize")(test_wrong_arguments_are_named)
    with pytest.raises(ValueError, match="top level"):
        app.function(sku="g1.1")(lambda: None)


def test_options_become_a_definition() -> None:
    code = rest.CodeUse(object="functions/images/x.tar.gz", sha256="0" * 64, bytes=1)
    assert resize.options is not None
    made = definition(resize.options, code=code, handler="m:resize", runtime="vision")
    assert made.retry_for == ["ValueError", "Odd"]
    assert made.secrets == [rest.SecretUse(name="db-password", env="DB_PASSWORD")]
    assert made.schedule == rest.ScheduleUse(cron="0 3 * * *")
    assert (made.runtime, made.handler, made.code) == ("vision", "m:resize", code)
    token = definition(Model.options, code=code, handler="m:Model", runtime=None).secrets
    assert token == [rest.SecretUse(name="token", env="API_TOKEN")]


def test_defaults_are_those_of_the_api() -> None:
    bare = definition(
        Options(sku="g1.1"), code=rest.CodeUse(object="o", sha256="0" * 64, bytes=1), handler="", runtime=None
    )
    assert bare == rest.FunctionPut(sku="g1.1", code=bare.code)


def test_outside_an_invocation_there_is_no_progress_and_no_invocation() -> None:
    penstock.progress(1, 2)
    with pytest.raises(penstock.FunctionError, match="does not run for an invocation"):
        penstock.current_invocation()


def test_everything_that_is_exported_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError):
        penstock.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_units_files_are_all_named_and_of_python_3_10() -> None:
    package = Path(penstock.__file__).parent
    there = {file for folder in ("functions", "framework") for file in (package / "sdk" / folder).glob("*.py")}
    named = {package.parent / name for name in tenant.FILES}
    assert there <= named
    for content in tenant.sources().values():
        ast.parse(content, feature_version=(3, 10))


def test_a_block_of_imports_passes_over_what_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "missing", [])
    with app.imports():
        import nothing_like_this  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert imports.missing == ["nothing_like_this"]
    with pytest.raises(ValueError, match="mine"), app.imports():
        raise ValueError("mine")


def test_a_block_of_imports_is_real_in_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_inside", [True])
    with pytest.raises(ModuleNotFoundError), app.imports():
        import nothing_like_this  # noqa: F401  # pyright: ignore[reportMissingImports]
