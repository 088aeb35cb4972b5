"""Projects, their members and their quotas."""

from dataclasses import replace
from typing import Annotated

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import Column, notice
from penstock.cli.profiles import Profile, check_name, config_path, read, write
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Member, Project, Quota

app = group("project", "Projects: the scope of everything that you create.")
members = group("member", "Who has which role in a project.")

COLUMNS: list[Column[Project]] = [
    Column("id", lambda project: project.id),
    Column("name", lambda project: project.name),
    Column("organisation", lambda project: project.organisation_id),
    Column("created", lambda project: project.created_at),
]
MEMBER_COLUMNS: list[Column[Member]] = [
    Column("principal", lambda member: member.principal_id),
    Column("kind", lambda member: member.principal_kind),
    Column("name", lambda member: member.display_name),
    Column("role", lambda member: member.role),
    Column("since", lambda member: member.created_at),
]
QUOTA_COLUMNS: list[Column[Quota]] = [
    Column("project", lambda quota: quota.project_id),
    Column("gpus used", lambda quota: quota.gpus_used),
    Column("gpus max", lambda quota: quota.gpus_max),
]

ProjectId = Annotated[str, typer.Argument(help="The project's id (prj_…).")]
PrincipalId = Annotated[str, typer.Argument(help="A user (usr_…) or a service account (sva_…).")]


@command(app, "list", example="penstock project list")
def list_(session: Session) -> None:
    """List the projects that you may see."""
    with session.client() as client:
        session.output.items(client.projects.list(), COLUMNS)


@command(app, "create", example="penstock project create research")
def create(
    session: Session,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    organisation: Annotated[str | None, typer.Option(help="In this organisation (org_…); operators only.")] = None,
) -> None:
    """Make a project."""
    with session.client() as client:
        session.output.item(client.projects.create(name, organisation_id=organisation), COLUMNS)


@command(app, "show", example="penstock project show prj_default")
def show(session: Session, project_id: ProjectId) -> None:
    """Show a project."""
    with session.client() as client:
        session.output.item(client.projects.get(project_id), COLUMNS)


@command(app, "rename", example="penstock project rename prj_default playground")
def rename(session: Session, project_id: ProjectId, name: Annotated[str, typer.Argument(help="New name.")]) -> None:
    """Rename a project."""
    with session.client() as client:
        session.output.item(client.projects.update(project_id, name=name), COLUMNS)


@command(app, "delete", example="penstock project delete prj_01k9z3v5x7y9a1b3c5d7e9f1g3")
def delete(session: Session, project_id: ProjectId) -> None:
    """Delete an empty project."""
    with session.client() as client:
        client.projects.delete(project_id)
    notice(f"deleted {project_id}")


@command(app, "use", example="penstock project use prj_01k9z3v5x7y9a1b3c5d7e9f1g3")
def use(
    session: Session,
    project_id: Annotated[str | None, typer.Argument(help="The project's id (prj_…).")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Go back to the key's own project.")] = False,
) -> None:
    """Act in this project from now on; it is stored in the profile."""
    if (project_id is None) != clear:
        raise CliError("give either a project's id or --clear", field="project_id")
    resolved = session.resolved()
    if project_id is not None:
        session.flags = replace(session.flags, project=project_id)
        with session.client() as client:
            notice(f"now in {client.projects.get(project_id).name}")
    path = config_path(session.environ)
    file = read(path)
    name = check_name(resolved.profile.text if resolved.profile else file.current)
    profile = replace(file.profiles.get(name, Profile()), project=project_id)
    write(path, file.with_profile(name, profile))


@command(app, "quota", example="penstock project quota prj_default --gpus-max 16")
def quota(
    session: Session,
    project_id: ProjectId,
    gpus_max: Annotated[int | None, typer.Option(help="Change the limit; operators only.")] = None,
) -> None:
    """Show how many GPUs a project may hold and holds, or change it."""
    with session.client() as client:
        if gpus_max is None:
            session.output.item(client.projects.quota(project_id), QUOTA_COLUMNS)
        else:
            session.output.item(client.projects.set_quota(project_id, gpus_max=gpus_max), QUOTA_COLUMNS)


@command(app, "members", example="penstock project members prj_default")
@command(members, "list", example="penstock member list prj_default")
def list_members(session: Session, project_id: ProjectId) -> None:
    """List everyone with a role in a project."""
    with session.client() as client:
        session.output.items(client.projects.members.list(project_id), MEMBER_COLUMNS)


@command(members, "set", example="penstock member set prj_default usr_01k9z3v5x7y9a1b3c5d7e9f1g3 --role viewer")
def set_member(
    session: Session,
    project_id: ProjectId,
    principal_id: PrincipalId,
    role: Annotated[str, typer.Option(help="owner, admin, developer, viewer or billing.")],
) -> None:
    """Give someone a role in a project, or change it."""
    with session.client() as client:
        session.output.item(client.projects.members.put(project_id, principal_id, role=role), MEMBER_COLUMNS)


@command(members, "remove", example="penstock member remove prj_default usr_01k9z3v5x7y9a1b3c5d7e9f1g3")
def remove_member(session: Session, project_id: ProjectId, principal_id: PrincipalId) -> None:
    """Take someone's role in a project away."""
    with session.client() as client:
        client.projects.members.remove(project_id, principal_id)
    notice(f"removed {principal_id}")
