"""Requirements by name are resolved on a node: to a lock with hashes, from the operator's packages alone."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from node_host import Host, tenant_folder
from penstock.node.errors import Failed, Refused
from penstock.node.resolver import Resolver
from penstock.wire import locks
from penstock.wire.tasks import RuntimeBuild, RuntimeLock, RuntimeResolve
from wheels import sdist, wheel


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages that the installer's user can read."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
async def host(node_folder: Path, packages: Path) -> AsyncIterator[Host]:
    """A node that knows that folder alone."""
    host = Host.open(node_folder, tenant_folder(), packages=packages)
    yield host
    await host.units.stop_all(0)
    await host.close()


async def resolve(host: Host, text: str, base: str = "python:3") -> str:
    assert host.resolver is not None
    return locks.unpack((await host.resolver.resolve(RuntimeResolve(base=base, requirements=text))).lock)


async def test_names_become_a_lock_that_can_be_built(host: Host, packages: Path) -> None:
    old = wheel(packages, "tiny", "1.0")
    lines = [wheel(packages, "deep", "0.5", needs=("tiny>=1.0",)), wheel(packages, "tiny", "2.0")]
    lock = await resolve(host, "deep")
    assert lock == locks.normal("".join(lines))
    assert await resolve(host, "deep\ntiny<2") == locks.normal(lines[0] + old)
    assert host.builder is not None
    wanted = RuntimeLock(digest=locks.digest("python:3", lock), base="python:3", lock=locks.pack(lock))
    assert (await host.builder.build(RuntimeBuild(runtime=wanted))).bytes > 0
    assert sorted(entry.name for entry in (host.folder / "runtimes").iterdir()) == [wanted.digest]


@pytest.mark.parametrize(
    ("text", "named"), [("nosuchthing", "nosuchthing"), ("tiny>=9", "tiny"), ("tiny<2\ndeep", "tiny")]
)
async def test_what_cannot_be_had_is_named(host: Host, packages: Path, text: str, named: str) -> None:
    wheel(packages, "tiny", "1.0")
    wheel(packages, "deep", "0.5", needs=("tiny>=2",))
    with pytest.raises(Failed) as failed:
        await resolve(host, text)
    assert failed.value.code == "unresolvable"
    assert named in failed.value.detail


async def test_source_packages_are_not_taken_and_never_run(host: Host, packages: Path, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    sdist(packages, "fromsource", canary=canary)
    with pytest.raises(Failed) as failed:
        await resolve(host, "fromsource")
    assert failed.value.code == "unresolvable"
    assert "fromsource" in failed.value.detail
    assert not canary.exists()


async def test_an_index_that_does_not_answer_is_said(host: Host) -> None:
    assert host.resolver is not None
    installer = host.resolver._installer
    source = replace(installer.source, index_url="http://127.0.0.1:9/simple", find_links="")
    away = Resolver(
        images=host.resolver._images,
        environments=host.resolver._environments,
        installer=replace(installer, source=source),
    )
    with pytest.raises(Failed) as failed:
        await away.resolve(RuntimeResolve(base="python:3", requirements="tiny\n"))
    assert failed.value.code == "index_away"


async def test_it_is_given_up_after_its_time(host: Host, packages: Path) -> None:
    assert host.resolver is not None
    wheel(packages)
    parts = host.resolver
    hasty = Resolver(images=parts._images, environments=parts._environments, installer=parts._installer, seconds=0.001)
    with pytest.raises(Failed) as failed:
        await hasty.resolve(RuntimeResolve(base="python:3", requirements="tiny\n"))
    assert failed.value.code == "resolve_timeout"
    assert list((host.folder / "runtimes").iterdir()) == []


async def test_the_node_trusts_no_requirements_that_it_has_not_read(host: Host) -> None:
    with pytest.raises(Refused):
        await resolve(host, "--index-url https://evil.example/simple\ntiny\n")
    with pytest.raises(Failed) as failed:
        await resolve(host, "tiny", base="windows:95")
    assert failed.value.code == "unknown_image"
