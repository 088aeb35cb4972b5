"""Which ports an install takes."""

import pytest

from penstock.kit.errors import Invalid
from penstock.processes.up import endpoints
from penstock.processes.up.endpoints import USUAL, Wanted, choose
from penstock.processes.up.folder import Ports


def test_the_usual_ports_are_taken_when_they_are_free() -> None:
    assert choose(Wanted(), None, available=lambda _, __: True) == (USUAL, [])


def test_the_ports_of_the_last_start_come_first() -> None:
    last = Ports(api=9000, gateway=9001, link=9002)
    assert choose(Wanted(), last, available=lambda _, __: True) == (last, [])


def test_a_busy_usual_port_is_replaced_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "free_port", lambda: 23456)
    ports, notes = choose(Wanted(), None, available=lambda port, _: port != 8081)
    assert ports == Ports(api=8080, gateway=23456, link=8443)
    assert notes == ["port 8081 is in use: the gateway listens on 23456 instead"]


def test_a_port_that_was_asked_for_wins_over_another_that_would_usually_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "free_port", lambda: 23456)
    ports, _ = choose(Wanted(link=8080), None, available=lambda _, __: True)
    assert ports == Ports(api=23456, gateway=8081, link=8080)


def test_equal_ports_are_refused() -> None:
    with pytest.raises(Invalid, match="must differ"):
        choose(Wanted(api=9000, link=9000), None, available=lambda _, __: True)


@pytest.mark.parametrize("address", ["nonsense", "0.0.0.0", "::1", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_refused(address: str) -> None:
    with pytest.raises(Invalid) as refused:
        choose(Wanted(host=address), None, available=lambda _, __: True)
    assert refused.value.field == "address"


def test_on_an_address_nats_has_a_port_that_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = choose(Wanted(host="127.0.0.2"), None, available=lambda _, __: True)
    assert first.nats == 8444
    asked, _ = choose(Wanted(nats=9003), first, available=lambda _, __: True)
    assert choose(Wanted(), asked, available=lambda _, __: True)[0].nats == 9003
    monkeypatch.setattr(endpoints, "free_port", lambda: 23456)
    busy, notes = choose(Wanted(), first, available=lambda port, _: port != 8444)
    assert busy.nats == 23456
    assert notes[1] == "port 8444 is in use: NATS listens on 23456 instead"


def test_on_loopback_nats_has_no_port_to_choose() -> None:
    assert choose(Wanted(), None, available=lambda port, _: port != 8444) == (USUAL, [])
    with pytest.raises(Invalid, match="needs --address"):
        choose(Wanted(nats=9003), None, available=lambda _, __: True)


def test_an_address_is_remembered_and_said_to_be_open() -> None:
    ports, notes = choose(Wanted(host="127.0.0.2"), None, available=lambda _, host: host == "127.0.0.2")
    assert ports.host == "127.0.0.2"
    assert "without encryption" in notes[0]
    assert choose(Wanted(), ports, available=lambda _, __: True)[0].host == "127.0.0.2"
