"""What the commands that manage webhooks may be told, each option once."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.webhooks_shown import Format

Endpoint = Annotated[
    str | None, typer.Option(help="Of a Hub or of a robojax server; default: HF_ENDPOINT, or huggingface.co.")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token; default: HF_TOKEN, or the one of `hf auth login`.")
]
Token = Annotated[str | None, typer.Option(hidden=True, help="As `hf` has it; it stays in the shell's history.")]
Timeout = Annotated[float, typer.Option(help="Seconds that the Hub has for an answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
Form = Annotated[Format, typer.Option("--format", help="As `hf` has it.", hidden=True)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the id.", hidden=True)]
Id = Annotated[str, typer.Argument(metavar="ID", help="Of the webhook.")]
Url = Annotated[str | None, typer.Option(help="Address that it sends to.")]
JobId = Annotated[str | None, typer.Option(help="Job that it starts (from job.id), instead of --url.")]
Domain = Annotated[
    list[str] | None, typer.Option(help="repo or discussion (or session, of a robojax server); repeatable.")
]
Secret = Annotated[str | None, typer.Option(help="Secret of its deliveries; it stays in the shell's history.")]
SecretFile = Annotated[Path | None, typer.Option(help="File with the secret.")]
SecretEnv = Annotated[str | None, typer.Option(metavar="NAME", help="Environment variable with the secret.")]
Generate = Annotated[
    bool, typer.Option("--generate-secret", help="Make --secret-file with a new secret if it is not there.")
]
Secrets = Annotated[
    list[str] | None, typer.Option("--secrets", "-s", help="NAME (from the environment) or NAME=value for the job.")
]
SecretsFile = Annotated[str | None, typer.Option(help="File of NAME=value lines for the job; - for standard input.")]
AllowHttp = Annotated[
    list[str] | None, typer.Option(metavar="HOST", help="Host or network that may be sent to without TLS; repeatable.")
]
Watch = Annotated[list[str], typer.Option(help="What to watch, as model:someone/arm or org:someone; repeatable.")]
NewWatch = Annotated[list[str] | None, typer.Option(help="All that is to be watched from now on; repeatable.")]
AnyType = Annotated[bool, typer.Option("--any-type", help="Send a type in --watch that is not known here.")]
