"""What can be a function's name, definition and schedule."""

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.kit.errors import Invalid
from penstock.serverless import definitions
from penstock.serverless.service import validate
from penstock.wire.rest import CodeUse, FrameworkUse, FunctionPut, ScheduleUse

FOREIGN = f"prj_{'0' * 26}_f"
CODE = CodeUse(object="a", sha256="0" * 64, bytes=1)


def test_names_are_kept_in_small_letters() -> None:
    assert validate.name("prj_a", "SD-WebUI_2") == "sd-webui_2"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "ä", "x" * 64, "a>", "*"])
def test_names_that_no_subject_can_have_are_refused(name: str) -> None:
    with pytest.raises(Invalid):
        validate.name("prj_a", name)


def test_only_the_default_project_refuses_names_of_others() -> None:
    assert validate.name("prj_other", FOREIGN) == FOREIGN
    with pytest.raises(Invalid):
        validate.name("prj_default", FOREIGN)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"code": CODE, "handler": "m:f", "command": ["x"]}, "command"),
        ({"handler": "m:f"}, "handler"),
        ({"code": CODE}, "handler"),
        ({"workers_min": 3, "workers_max": 2}, "workers_min"),
        ({"framework": FrameworkUse(socketPath="/tmp/serverless-frameworks/x")}, "framework.socketPath"),
        ({"framework": FrameworkUse(socketPath="/tmp/serverless-framework/")}, "framework.socketPath"),
        ({"framework": FrameworkUse(socketPath="/tmp/serverless-framework/a/../../x")}, "framework.socketPath"),
        ({"framework": FrameworkUse(socketPath="/tmp/serverless-framework/" + "ä" * 41)}, "framework.socketPath"),
        ({"framework": FrameworkUse(socketPath="/tmp/serverless-framework/a\0b")}, "framework.socketPath"),
        ({"schedule": ScheduleUse(cron="* * * * * *")}, "schedule.cron"),
        ({"schedule": ScheduleUse(cron="0 0 31 2 *")}, "schedule.cron"),
        ({"schedule": ScheduleUse(cron="* * * * *", timezone="../etc/passwd")}, "schedule.timezone"),
        ({"schedule": ScheduleUse(cron="* * * * *", timezone="")}, "schedule.timezone"),
    ],
)
def test_the_field_that_is_wrong_is_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        validate.definition(FunctionPut(sku="s", **changed))
    assert caught.value.field == field


def test_a_definition_may_be_nothing_but_a_sku() -> None:
    validate.definition(FunctionPut(sku="s"))
    validate.definition(FunctionPut(sku="s", code=CODE, handler="m:f", schedule=ScheduleUse(cron="0 4 * * 1-5")))


def test_the_longest_socket_path_that_fits_is_taken() -> None:
    path = "/tmp/serverless-framework/"
    validate.framework(FrameworkUse(socketPath=path + "x" * (validate.SOCKET_BYTES_MAX - len(path))))


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        ("30 2 * * *", "UTC", "2026-11-16T02:30:00", "2026-11-17T02:30:00"),
        ("30 2 * * *", "Asia/Kolkata", "2026-11-16T00:00:00", "2026-11-16T21:00:00"),
        # Clocks go forward over 02:30 and back over it: once each.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00", "2026-03-29T01:00:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00", "2026-10-25T00:30:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30:00", "2026-10-26T01:30:00"),
        ("0 0 29 2 *", "UTC", "2026-01-01T00:00:00", "2028-02-29T00:00:00"),
    ],
)
def test_times_are_those_of_the_zone(cron: str, zone: str, after: str, expected: str) -> None:
    found = validate.next_time(ScheduleUse(cron=cron, timezone=zone), datetime.fromisoformat(after).replace(tzinfo=UTC))
    assert found == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_the_digest_says_whether_definitions_say_the_same() -> None:
    one = FunctionPut(sku="s", env={"a": "1", "b": "2"})
    assert definitions.digest(one) == definitions.digest(FunctionPut(sku="s", env={"b": "2", "a": "1"}))
    assert definitions.digest(one) != definitions.digest(FunctionPut(sku="s", env={"a": "1"}))
