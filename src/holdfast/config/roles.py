"""The roles: one frozen record for each part of Holdfast that is configured.

Guaranteed: a record that exists is usable. Each option states its default, limits and meaning where
it is defined, and relations between options are checked at construction: what cannot work together
raises a `ConfigError` that says why.

Not checked: whether files, hosts or ports exist. The order of the classes is that of the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import names
from holdfast.config.option import Role, checked_by, option
from holdfast.errors import ConfigError

RESTARTS = ("immediately", "after_grace", "never")
"""The restart strategies, as in `holdfast.model.run`, which is a layer above."""
LEASES = {"local": (2.0, 0.5, 0.1), "lan": (5.0, 2.0, 0.15), "wan": (15.0, 5.0, 1.0)}
"""By profile: a lease's TTL, how often it is renewed, how often its holder is looked for."""


@dataclass(frozen=True, repr=False)
class ConnectionConfig(Role):
    """How every process and every client reaches NATS."""

    table = "connection"

    nats_url: str = option(
        "nats://127.0.0.1:4222",
        "Servers to connect to, separated by commas: `nats://`, `tls://`, `ws://` or `wss://`.",
    )
    namespace: str = option(
        names.DEFAULT_NAMESPACE,
        "First part of every stream, subject and bucket name: two namespaces share a NATS "
        "account without seeing each other.",
    )
    user: str = option("", "User name, together with `password`.")
    password: str = option("", "Password of `user`.", secret=True)
    token: str = option("", "Authentication token.", secret=True)
    credentials_file: str = option(
        "", "File with a login as `holdfast auth user` and `holdfast auth agent` issue it."
    )
    unsigned_requests: str = option(
        "refuse",
        "Requests (drain, cancel, fleet runs) and commands of earlier versions do not prove who "
        "sent them: `accept` them only while those versions are being replaced. Without "
        "`credentials_file` nothing is signed or refused.",
        choices=("refuse", "accept"),
    )
    nkey_seed_file: str = option("", "File with an NKey seed.")
    creds_file: str = option("", "File with a user JWT and its seed (`.creds`).")
    tls_ca: str = option("", "File with the certificate authority that signed the servers'.")
    tls_cert: str = option("", "File with the client's certificate, together with `tls_key`.")
    tls_key: str = option("", "File with the key of `tls_cert`.")
    tls_hostname: str = option("", "Name the server's certificate must carry, if not the URL's.")
    tls_handshake: str = option(
        "after_info",
        "`first` for servers with `handshake_first`: not one byte travels in the clear.",
        choices=("after_info", "first"),
    )
    inbox_prefix: str = option(
        "",
        "Subject below which answers arrive, where permissions keep it from other users; empty "
        "means that of `credentials_file`, else `_INBOX`.",
    )
    connect_timeout_seconds: float = option(
        5.0, "How long one attempt to connect may take.", least=0.05, most=3600
    )
    request_timeout_seconds: float = option(
        5.0,
        "How long an answer may take; after that the outcome is unknown.",
        least=0.05,
        most=3600,
    )
    replicas: int = option(
        0,
        "Copies of every stream: 1, 3 or 5; 0 means as many as the cluster has nodes for, "
        "at most 3.",
        least=0,
        most=5,
    )

    @property
    def servers(self) -> list[str]:
        """The URLs one by one."""
        return [url.strip() for url in self.nats_url.split(",")]

    @property
    def accept_unsigned(self) -> bool:
        """Whether requests and commands of earlier versions are obeyed."""
        return self.unsigned_requests == "accept"

    @property
    def encrypted(self) -> bool:
        """Whether TLS was asked for; a server that demands it is told apart when connecting."""
        schemes = ("tls://", "wss://")
        return bool(self.tls_ca or self.tls_cert) or self.nats_url.startswith(schemes)

    def _check_relations(self) -> None:
        _check_servers(self.servers)
        checked_by(names.Names, self.namespace)
        if self.replicas not in (0, 1, 3, 5):
            raise ConfigError("replicas must be 0, 1, 3 or 5: an even number adds no safety")
        if bool(self.password) != bool(self.user):
            raise ConfigError("user and password belong together: give both or neither")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")
        if self.tls_handshake == "first" and not self.encrypted:
            raise ConfigError("tls_handshake = first needs TLS: write tls:// in nats_url")
        if self.inbox_prefix:
            checked_by(names.check_event, self.inbox_prefix.removeprefix("_"))
        logins = ("user", "token", "credentials_file", "nkey_seed_file", "creds_file")
        given = [n for n in logins if getattr(self, n)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different ways to log in: give one")


@dataclass(frozen=True, repr=False)
class WorkerConfig(Role):
    """What one `holdfast worker` does."""

    table = "worker"

    group: str = option(names.DEFAULT_GROUP, "Group whose jobs this worker runs.")
    concurrency: int = option(
        100, "Runs that one process executes at the same time.", least=1, most=100_000
    )
    threads: int = option(
        0,
        "Threads in which one process runs plain (`def`) handlers; 0 means as many as it has "
        "cores. More help handlers that wait, and only slow down those that compute.",
        least=0,
        most=10_000,
    )
    pool_processes: int = option(
        0,
        'Processes in which one worker process runs handlers with `execution="process"`, made when '
        "they are needed; 0 means as many as it has cores.",
        least=0,
        most=1024,
    )
    processes: int = option(1, "Processes that share the work.", least=1, most=1024)
    max_runs: int = option(
        0, "Runs after which a process is replaced by a fresh one; 0 means never.", least=0
    )
    grace_seconds: float = option(
        0.0,
        "How long running handlers may go on after SIGTERM; 0 means as the liveness profile says.",
        least=0,
        most=86_400,
    )
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")
    ack_wait_seconds: float = option(
        5.0,
        "After this long without a sign of life the server gives a run to another worker.",
        least=0.5,
        most=3600,
    )
    extend_seconds: float = option(
        1.5,
        "How often a worker gives that sign for everything it holds; below half of "
        "`ack_wait_seconds`.",
        least=0.05,
    )
    blocked_seconds: float = option(
        60.0,
        "How long a handler may block the event loop, or hold the interpreter. After that the "
        "node enters ERROR, its process is killed, and the crash counts for that run only; 0 means "
        "for ever.",
        least=0,
        most=86_400,
    )
    restart: str = option(
        "",
        "Restart strategy of runs whose worker was lost, where neither the job nor the group sets "
        "one: `immediately`, `after_grace` or `never`; empty means `immediately`.",
        choices=("", *RESTARTS),
    )
    group_restart: str = option(
        "",
        "Restart strategies of single groups, e.g. `payments=after_grace, rockets=never`. They "
        "override `app.group` in the code; a job's own strategy wins.",
    )
    crash_limit: int = option(
        3, "Crashes of its process after which a run becomes a dead letter.", least=1, most=1000
    )
    canary_seconds: float = option(
        5.0, "How often a worker sends itself a message to prove that it can.", least=0.5, most=3600
    )
    unknown_payload_seconds: float = option(
        600.0,
        "How long a run whose payload has an unknown member is left to workers of another version, "
        "as during a rollout, before it becomes a dead letter; 0 means at once.",
        least=0,
        most=86_400,
    )
    short_wait_seconds: float = option(
        10.0,
        "Retries up to this wait stay with the consumer; longer ones become scheduled messages "
        "and do not count as lag.",
        least=0,
        most=3600,
    )
    cleanup_seconds: float = option(
        10.0,
        "How long a handler that was cancelled may clean up. After that its attempt is settled "
        "without it; it keeps its place until it ends.",
        least=0,
        most=3600,
    )
    settings_file: str = option(
        "",
        "File in which the agent on this host keeps the settings (`settings.json` in its "
        "`data_dir`): handlers read them as `ctx.settings`. Read again when it changes.",
    )

    @property
    def restarts(self) -> dict[str, str]:
        """The restart strategies of single groups."""
        parts = (part.partition("=") for part in self.group_restart.split(",") if part.strip())
        return {group.strip(): strategy.strip() for group, _, strategy in parts}

    def _check_relations(self) -> None:
        checked_by(names.check_name, self.group, "group")
        for group, strategy in self.restarts.items():
            checked_by(names.check_name, group, "group_restart: group")
            if strategy not in RESTARTS:
                raise ConfigError(
                    f"group_restart: {group}={strategy} is not one of {', '.join(RESTARTS)}; "
                    "write payments=after_grace, rockets=never"
                )
        if self.extend_seconds >= self.ack_wait_seconds / 2:
            raise ConfigError(
                f"extend_seconds ({self.extend_seconds:g}) must be below half of ack_wait_seconds "
                f"({self.ack_wait_seconds:g}): else one late extension gives the run to another "
                "worker while this one still executes it"
            )


@dataclass(frozen=True, repr=False)
class LivenessConfig(Role):
    """How fast the death of a node is noticed. Every number that is 0 comes from the profile."""

    table = "liveness"

    profile: str = option(
        "lan",
        "Numbers for one machine, one network, or several sites; docs/liveness.md explains each.",
        choices=("local", "lan", "wan"),
    )
    enabled: str = option(
        "yes", "Whether this node is judged at all; `no` is for debugging.", choices=("yes", "no")
    )
    cut_off: str = option(
        "stop",
        "What a worker does when it cannot reach NATS for its timeout. `stop`: it is DISCONNECTED, "
        "takes no runs, lets handlers end within the grace period, interrupts the others, and "
        "starts again as a new node when NATS is back. `wait`: handlers continue, and so does the "
        "worker when NATS is back and nobody has declared it lost.",
        choices=("stop", "wait"),
    )
    heartbeat_seconds: float = option(
        0.0, "How often a node renews its record.", least=0, most=3600
    )
    timeout_seconds: float = option(
        0.0, "Silence after which a node is declared lost.", least=0, most=86_400
    )
    initial_delay_seconds: float = option(
        0.0, "How long a new node is not judged.", least=0, most=86_400
    )
    ping_seconds: float = option(
        0.0, "How often a coordinator asks whether the node is there.", least=0, most=3600
    )
    confirm_seconds: float = option(
        0.0,
        "How long the absence of a node must be proved before it is declared lost.",
        least=0,
        most=3600,
    )
    ping_misses: int = option(
        0,
        "Pings in a row with proof of absence that are tolerated where the server cannot be asked "
        "about the node's connection.",
        least=0,
        most=1000,
    )
    grace_seconds: float = option(
        0.0,
        "Time to finish after SIGTERM, and before `after_grace` starts a lost node's runs again.",
        least=0,
        most=86_400,
    )


@dataclass(frozen=True, repr=False)
class SchedulerConfig(Role):
    """What one `holdfast scheduler` does."""

    table = "scheduler"

    profile: str = option(
        "lan",
        "How far apart the machines are: sets the times below that are 0.",
        choices=tuple(LEASES),
    )
    lease_ttl_seconds: float = option(
        0.0,
        "After this long without a renewal the leader's lease expires; 0: by profile (2, 5 or 15).",
        least=0,
        most=3600,
    )
    lease_renew_seconds: float = option(
        0.0,
        "How often the leader renews its lease; 0: by profile (0.5, 2 or 5).",
        least=0,
        most=3600,
    )
    probe_seconds: float = option(
        0.0,
        "How often the others look whether the leader's process is there; 0: by profile "
        "(0.1, 0.15 or 1).",
        least=0,
        most=3600,
    )
    probe_misses: int = option(
        3, "Looks in a row that find nobody before another takes over.", least=1, most=100
    )
    overdue_seconds: float = option(
        1.0,
        "A slot that is due for so long and not recorded makes another scheduler look at the "
        "leader, and take over when it does not answer; after three times this it does so anyway.",
        least=0.1,
        most=3600,
    )
    missed_after_seconds: float = option(
        10.0,
        "A slot that could not be sent within this time of being due was missed: `catch_up` "
        "decides about it. Until then it is late, and fires.",
        least=1,
        most=86_400,
    )
    clock_tolerance_seconds: float = option(
        1.0,
        "A scheduler whose clock differs by more from the server's fires nothing.",
        least=0.05,
        most=60,
    )
    slot_ttl_seconds: int = option(
        604_800,
        "How long the record of a slot is kept at most; `slots_kept` may make it shorter.",
        least=3600,
    )
    slots_kept: int = option(
        1000,
        "How many slots of one schedule are kept, about; none goes before an hour has passed.",
        least=1,
        most=1_000_000,
    )
    release: str = option(
        "",
        "The release of the app whose schedules are registered, such as a build number: a lower "
        "one never replaces what a higher one registered.",
    )
    ready_file: str = option("", "File that exists while this scheduler is ready.")
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")

    @property
    def lease(self) -> tuple[float, float, float]:
        """TTL, renewal and probe, as given or by profile."""
        ttl, renew, probe = LEASES[self.profile]
        return (
            self.lease_ttl_seconds or ttl,
            self.lease_renew_seconds or renew,
            self.probe_seconds or probe,
        )

    def _check_relations(self) -> None:
        ttl, renew, _ = self.lease
        if ttl < 1 or ttl < 2 * renew:
            raise ConfigError(
                f"lease_ttl_seconds ({ttl:g}) must be at least 1 and at least twice "
                f"lease_renew_seconds ({renew:g}): else one late renewal costs the lead"
            )
        if not all(p.isascii() and p.isdigit() for p in self.release.split(".") if self.release):
            raise ConfigError(f"release {self.release!r} must be numbers with dots: 41 or 1.10.2")


@dataclass(frozen=True, repr=False)
class WebConfig(Role):
    """What one `holdfast web` does: the API and the pages."""

    table = "web"

    host: str = option(
        "127.0.0.1",
        "Address to listen on; one that others can reach needs tokens.",
    )
    port: int = option(8080, "Port to listen on; 0 means any that is free.", least=0, most=65_535)
    hosts: str = option(
        "",
        "Names by which browsers and programs reach it, separated by commas (`jobs.example.com`, "
        "`*.example.com`, `*` for any). Addresses, `localhost` and this machine's own name need "
        "no mention; every other name is refused.",
    )
    tokens: str = option(
        "",
        "Who may log in, separated by commas: `NAME:ROLE:HASH`, as `holdfast web token` prints it.",
        secret=True,
    )
    tokens_file: str = option(
        "", "File with one such token on each line; read again when it changes."
    )
    session_seconds: float = option(43_200.0, "How long a login lasts.", least=60, most=2_592_000)
    rate_per_second: float = option(
        50.0,
        "Requests that one user may make from one address each second, with four seconds' worth "
        "in one go; 0 means no limit.",
        least=0,
        most=1_000_000,
    )
    connections: int = option(
        1000,
        "Open connections, at most. Beyond that, those that have waited longest for the rest of "
        "their request are closed.",
        least=10,
        most=1_000_000,
    )
    connections_per_address: int = option(
        200,
        "Open connections for each address, at most; 0 means no limit. `proxies` have no limit.",
        least=0,
        most=1_000_000,
    )
    proxies: str = option(
        "",
        "Addresses of proxies in front of it, separated by commas: their `X-Forwarded-For` and "
        "`X-Forwarded-Proto` are believed.",
    )
    tls_cert: str = option("", "File with the certificate to serve, together with `tls_key`.")
    tls_key: str = option("", "File with the key of `tls_cert`.")
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")

    def _check_relations(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")


@dataclass(frozen=True, repr=False)
class RecordConfig(Role):
    """How long Holdfast remembers."""

    table = "record"

    keyed_ttl_seconds: int = option(
        86_400,
        "How long the record of a finished run with a key, or of a slot, is kept: for so long "
        "the same key is known as a repeat.",
        least=1,
    )
    keyless_ttl_seconds: int = option(
        3600, "How long the record of any other finished run, with its result, is kept.", least=1
    )
    dedup_window_seconds: float = option(
        120.0,
        "For how long the server drops a second message with the same id.",
        least=0.1,
        most=86_400,
    )
    dead_days: int = option(30, "How long dead letters are kept.", least=1, most=36_500)
    event_days: int = option(7, "How long events are kept.", least=1, most=36_500)
    ledger_days: int = option(7, "How long the audit ledger is kept.", least=1, most=36_500)

    def _check_relations(self) -> None:
        for name in ("keyed_ttl_seconds", "keyless_ttl_seconds"):
            if getattr(self, name) < self.dedup_window_seconds:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must not be below dedup_window_seconds "
                    f"({self.dedup_window_seconds:g}): else the server drops a repeat of which "
                    "no record is left"
                )


@dataclass(frozen=True, repr=False)
class LogConfig(Role):
    """What the processes write to standard error."""

    table = "log"

    level: str = option(
        "info", "The least important lines to write.", choices=("debug", "info", "warning", "error")
    )
    format: str = option(
        "text", "Lines for people, or one JSON object per line.", choices=("text", "json")
    )


def _check_servers(servers: list[str]) -> None:
    for number, url in enumerate(servers, 1):
        scheme, found, rest = url.partition("://")
        if not found or scheme not in ("nats", "tls", "ws", "wss") or not rest.strip("/"):
            raise ConfigError(
                f"nats_url: server {number} of {len(servers)} is not a URL such as "
                "nats://host:4222 (a ',' inside a password must be written %2C)"
            )
