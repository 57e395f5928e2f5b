"""Ray nodes of a host group, and their certificates.

Ray's own token travels with every call, and whoever has it can run any code. So nothing of it is said in the open: all
of Ray's connections use TLS, with certificates on both sides that are signed by a key made from the secret.
"""

import hashlib
import hmac
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# What a node has one of when it is there for `robojax serve --hosts-count`; a placement group asks for it.
RESOURCE = "robojax_host"
# The certificates are made anew at each start; a server that runs for longer than this is started again before.
VALIDITY = timedelta(days=3650)
# Ray ends a process that has not reached its cluster's head for a minute. One that moves robots has to outlive it.
NO_RECONNECT_TIMEOUT = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6)}
CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256

# In the environment of a node that `robojax follow` began: where the host's actor writes lines for people, and the
# address of this machine. Ray has another one for 127.0.0.1.
PIPE, ADDRESS = "ROBOJAX_FOLLOW_PIPE", "ROBOJAX_FOLLOW_ADDRESS"

_PREFIX = "robojax-"  # short: Ray's sockets are in there, and their paths have an end
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its handlers print the stacks of all threads at a SIGTERM, which is how a server is ended in order.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # A policy's programs run in Ray's workers here: with the priority of this process, all accelerators, and memory of
    # which the system and nobody else decides who has too much.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # When a connection to a host breaks, Ray waits a second for its head to say why, and looks once a second whether it
    # has waited for so long; robots are to be held before.
    "RAY_timeout_ms_task_wait_for_death_info": "100",
    "RAY_core_worker_internal_heartbeat_ms": "100",
    # Observations up to so many bytes travel with the call. In the object store one of 480x640 takes 7.0 ms in place of
    # 2.8 to the other host (medians on one machine with 2 cores).
    "RAY_max_direct_call_object_size": str(8 << 20),
}
_START = (
    "import sys; from service.processes import exit_with_parent; exit_with_parent(int(sys.argv.pop(1)), 9); "
    "from ray.scripts.scripts import main; main()"
)


class Credentials:
    """Certificates and environment with which a process may join the hosts; their folder is for this user alone.

    Args:
        secret: that all hosts know; neither it nor anything that it could be found from is in the files.
        addresses: of this machine, as other hosts reach it.

    Attributes:
        folder: short, as Ray has sockets in it.
        environment: for Ray, in its nodes and in whoever connects to them.
    """

    def __init__(self, secret: bytes, addresses: Sequence[str]):
        _remove_stale()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        signer = ec.derive_private_key(1 + int.from_bytes(_derive(secret, "authority", 48)) % (CURVE_ORDER - 1), _CURVE)
        own = ec.generate_private_key(_CURVE)
        authority, name = _name("robojax hosts"), _name("robojax host")
        authority_certificate = _certificate(authority, signer.public_key(), authority, signer, is_authority=True)
        host = _certificate(name, own.public_key(), authority, signer, addresses=sorted({"127.0.0.1", *addresses}))
        pem, text = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        files = {
            "RAY_TLS_CA_CERT": authority_certificate.public_bytes(pem),
            "RAY_TLS_SERVER_CERT": host.public_bytes(pem),
            "RAY_TLS_SERVER_KEY": own.private_bytes(pem, text, serialization.NoEncryption()),
            "RAY_AUTH_TOKEN_PATH": _derive(secret, "token", 32).hex().encode(),
        }
        for variable, content in files.items():
            (self.folder / variable).write_bytes(content)
            (self.folder / variable).chmod(0o600)
        self.environment: Mapping[str, str] = {
            **_SETTINGS,
            **{variable: str(self.folder / variable) for variable in files},
            "RAY_AUTH_MODE": "token",
            "RAY_USE_TLS": "1",
        }

    def read(self, variable: str) -> bytes:
        """Return the content of one of the files."""
        return (self.folder / variable).read_bytes()

    def remove(self) -> None:
        """Delete the folder, with what Ray wrote there."""
        shutil.rmtree(self.folder, ignore_errors=True)


class RayNode:
    """Runs ``ray start`` in a process that is killed when this one ends; all of Ray's processes end with it.

    Args:
        arguments: of ``ray start``.
        environment: besides that of this process.
        on_end: called in a thread with the last of what it wrote, should it end before `kill`.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], on_end: Callable[[str], None]):
        # `ray start` begins no node where there is an address.
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._command = [sys.executable, "-c", _START, str(os.getpid()), "start", "--block", *arguments]
        self._environment = inherited | dict(environment)
        self._on_end = on_end
        self._process: subprocess.Popen[str] | None = None
        self._is_killed = False
        self._begun = threading.Event()
        # Linux tells a child that the thread which started it is gone: this one is there as long as the child is.
        threading.Thread(target=self._run, name="ray-node", daemon=True).start()
        self._begun.wait()

    def kill(self) -> None:
        """Kill the node and all of its processes."""
        self._is_killed = True
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                node = psutil.Process(self._process.pid)
                for process in (*node.children(recursive=True), node):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            self._process.wait()

    def _run(self) -> None:
        with subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            self._process = process
            self._begun.set()
            last = ""
            for line in process.stdout or ():
                last = line.strip() or last
        if not self._is_killed:
            self._on_end(last)


def _remove_stale() -> None:
    """Delete folders of killed processes of this user."""
    for folder in Path("/tmp").glob(f"{_PREFIX}[0-9]*-*"):
        with suppress(OSError, ValueError):
            number = int(folder.name.removeprefix(_PREFIX).split("-")[0])
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and not psutil.pid_exists(number):
                shutil.rmtree(folder, ignore_errors=True)


def make_credentials(secret: bytes, host: str, port: int) -> Credentials:
    """Make the credentials of this machine for the cluster whose head is at this address.

    Raises:
        OSError: there is no way there.
    """
    addresses = [find_own_address(host, port)]
    with suppress(OSError):
        addresses.append(find_own_address("8.8.8.8", 53))  # what Ray uses instead of 127.0.0.1; nothing is sent
    return Credentials(secret, addresses)


def find_own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to another one.

    Raises:
        OSError: there is no way there.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def join_address(host: str, port: int) -> str:
    """Format host and port as Ray does."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_CURVE = ec.SECP256R1()


def _derive(secret: bytes, what: str, size: int) -> bytes:
    return hmac.digest(secret, b"robojax hosts 2 " + what.encode(), hashlib.sha512)[:size]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    *,
    addresses: Sequence[str] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if addresses:
        names = [x509.DNSName("localhost"), *map(_general_name, addresses)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)
