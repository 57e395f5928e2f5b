"""``robojax webhooks``: the commands of both sides, those who manage webhooks and those who receive them."""

import typer

from service.cli import webhooks_manage, webhooks_receive

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Manage webhooks of the Hub (or of a robojax server), receive them, look at what came.",
)
webhooks_manage.add_to(app)
webhooks_receive.add_to(app)
