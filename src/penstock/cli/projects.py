"""Projects, their members and their quotas."""

from dataclasses import replace
from typing import Annotated

import typer

from penstock.cli import completing, names
from penstock.cli.errors import CliError
from penstock.cli.many import say_each
from penstock.cli.output import ID, NEEDED, Column, notice
from penstock.cli.profiles import Profile, check_name, config_path, read, write
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Member, Project, Quota

app = group("project", "Projects: the scope of everything that you create.")
members = group("member", "Who has which role in a project.")

COLUMNS: list[Column[Project]] = [
    Column("id", lambda project: project.id, rank=ID),
    Column("name", lambda project: project.name, rank=NEEDED),
    Column("organisation", lambda project: project.organisation_id),
    Column("created", lambda project: project.created_at),
]
MEMBER_COLUMNS: list[Column[Member]] = [
    Column("principal", lambda member: member.principal_id, rank=ID),
    Column("kind", lambda member: member.principal_kind),
    Column("name", lambda member: member.display_name, rank=NEEDED),
    Column("role", lambda member: member.role),
    Column("since", lambda member: member.created_at),
]
QUOTA_COLUMNS: list[Column[Quota]] = [
    Column("project", lambda quota: quota.project_id, rank=ID),
    Column("gpus used", lambda quota: quota.gpus_used),
    Column("gpus max", lambda quota: quota.gpus_max),
]

ProjectName = Annotated[
    str, typer.Argument(metavar="PROJECT", help="The project's name or id (prj_…).", autocompletion=completing.projects)
]
Role = Annotated[
    str,
    typer.Option(
        help="owner, admin, developer, viewer or billing.", autocompletion=completing.words(*completing.ROLES)
    ),
]
PrincipalName = Annotated[
    str,
    typer.Argument(metavar="PRINCIPAL", help="A user (usr_…) or a service account (sva_…), by name or id."),
]


@command(app, "list", example="penstock project list")
def list_(session: Session) -> None:
    """List the projects that you may see."""
    with session.client() as client:
        session.output.items(client.projects.list(), COLUMNS)


@command(app, "create", example="penstock project create research")
def create(
    session: Session,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    organisation: Annotated[
        str | None, typer.Option(help="In this organisation, by name or id; operators only.")
    ] = None,
) -> None:
    """Make a project."""
    with session.client() as client:
        owner = None if organisation is None else names.organisation(client, organisation)
        session.output.item(client.projects.create(name, organisation_id=owner), COLUMNS)


@command(app, "show", example="penstock project show default")
def show(session: Session, project_name: ProjectName) -> None:
    """Show a project."""
    with session.client() as client:
        session.output.item(client.projects.get(names.project(client, project_name)), COLUMNS)


@command(app, "rename", example="penstock project rename research playground")
def rename(session: Session, project_name: ProjectName, name: Annotated[str, typer.Argument(help="New name.")]) -> None:
    """Rename a project."""
    with session.client() as client:
        session.output.item(client.projects.update(names.project(client, project_name), name=name), COLUMNS)


@command(app, "delete", example="penstock project delete research")
def delete(
    session: Session,
    projects: Annotated[
        list[str],
        typer.Argument(
            metavar="PROJECT…", help="The projects' names or ids (prj_…).", autocompletion=completing.projects
        ),
    ],
) -> None:
    """Delete empty projects."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.projects.delete(names.project(client, text))
            return f"deleted project {text}"

        say_each(session, projects, delete)


@command(app, "use", example="penstock project use research")
def use(
    session: Session,
    project_name: Annotated[
        str | None,
        typer.Argument(metavar="PROJECT", help="The project's name or id (prj_…).", autocompletion=completing.projects),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Go back to the key's own project.")] = False,
) -> None:
    """Act in this project from now on; it is stored in the profile."""
    from penstock.sdk.client import Client

    if (project_name is None) != clear:
        raise CliError("give either a project or --clear", field="project")
    resolved = session.resolved()
    project_id: str | None = None
    if project_name is not None:
        session.flags = replace(session.flags, project=project_name)
        target = session.target()
        project_id = target["project"]
        with Client(**target) as client:
            notice(f"now in {client.projects.get(str(project_id)).name} ({project_id})")
    path = config_path(session.environ)
    file = read(path)
    name = check_name(resolved.profile.text if resolved.profile else file.current)
    profile = replace(file.profiles.get(name, Profile()), project=project_id)
    write(path, file.with_profile(name, profile))


@command(app, "quota", example="penstock project quota research --gpus-max 16")
def quota(
    session: Session,
    project_name: ProjectName,
    gpus_max: Annotated[int | None, typer.Option(help="Change the limit; operators only.")] = None,
) -> None:
    """Show how many GPUs a project may hold and holds, or change it."""
    with session.client() as client:
        project_id = names.project(client, project_name)
        if gpus_max is None:
            session.output.item(client.projects.quota(project_id), QUOTA_COLUMNS)
        else:
            session.output.item(client.projects.set_quota(project_id, gpus_max=gpus_max), QUOTA_COLUMNS)


@command(app, "members", example="penstock project members research")
@command(members, "list", example="penstock member list research")
def list_members(session: Session, project_name: ProjectName) -> None:
    """List everyone with a role in a project."""
    with session.client() as client:
        session.output.items(client.projects.members.list(names.project(client, project_name)), MEMBER_COLUMNS)


@command(members, "set", example="penstock member set research 'Ada L' --role viewer")
def set_member(
    session: Session,
    project_name: ProjectName,
    principal: PrincipalName,
    role: Role,
) -> None:
    """Give someone a role in a project, or change it."""
    with session.client() as client:
        project_id, principal_id = names.project(client, project_name), names.principal(client, principal)
        session.output.item(client.projects.members.put(project_id, principal_id, role=role), MEMBER_COLUMNS)


@command(members, "remove", example="penstock member remove research 'Ada L'")
def remove_member(
    session: Session,
    project_name: ProjectName,
    principals: Annotated[
        list[str],
        typer.Argument(metavar="PRINCIPAL…", help="Users (usr_…) or service accounts (sva_…), by names or ids."),
    ],
) -> None:
    """Take the roles of some in a project away."""
    with session.client() as client:
        project_id = names.project(client, project_name)

        def remove(text: str) -> str:
            client.projects.members.remove(project_id, names.principal(client, text))
            return f"removed member {text}"

        say_each(session, principals, remove)
