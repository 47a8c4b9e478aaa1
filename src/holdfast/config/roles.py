"""The roles: one frozen record per configurable part of Holdfast.

Guaranteed: construction validates everything. Each option states its default, limits and meaning
where it is defined; values that cannot work together raise a `ConfigError` that says why.

Not checked: whether files, hosts or ports exist. Classes are in the order of the docs page.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import names
from holdfast.config.option import RoleConfig, checked_by, option
from holdfast.errors import ConfigError

RESTARTS = ("immediately", "after_grace", "never")
"""Copied from `holdfast.model.run`, which is a layer above."""
LEASES = {"local": (2.0, 0.5, 0.1), "lan": (5.0, 2.0, 0.15), "wan": (15.0, 5.0, 1.0)}
"""By profile: a lease's TTL, renewal interval and probe interval. The TTL is about three renewals,
so that one lost renewal does not cost the lease."""


@dataclass(frozen=True, repr=False)
class ConnectionConfig(RoleConfig):
    """How every process and every client reaches NATS."""

    table = "connection"

    nats_url: str = option("nats://127.0.0.1:4222")
    """Servers to connect to, separated by commas: `nats://`, `tls://`, `ws://` or `wss://`."""
    namespace: str = option(names.DEFAULT_NAMESPACE)
    """First part of every stream, subject and bucket name. Two namespaces can share a NATS account
    without seeing each other."""
    user: str = option("")
    """User name, together with `password`."""
    password: str = option("", secret=True)
    """Password of `user`."""
    token: str = option("", secret=True)
    """Authentication token."""
    credentials_file: str = option("")
    """Login file issued by `holdfast auth user` or `holdfast auth agent`."""
    unsigned_requests: str = option("refuse", choices=("refuse", "accept"))
    """Whether to accept unsigned requests (drain, cancel, fleet runs), which builds before 0.1.0
    send: set `accept` only during an upgrade. Without `credentials_file` nothing is signed and
    nothing is refused."""
    nkey_seed_file: str = option("")
    """File with an NKey seed."""
    creds_file: str = option("")
    """File with a user JWT and its seed (`.creds`)."""
    tls_ca: str = option("")
    """File with the certificate authority that signed the servers'."""
    tls_cert: str = option("")
    """File with the client's certificate, together with `tls_key`."""
    tls_key: str = option("")
    """File with the key of `tls_cert`."""
    tls_hostname: str = option("")
    """Name expected in the server's certificate, if it differs from the URL."""
    tls_handshake: str = option("after_info", choices=("after_info", "first"))
    """When TLS starts. Use `first` for servers with `handshake_first`: nothing is sent in clear
    text."""
    inbox_prefix: str = option("")
    """Prefix of the subjects on which replies arrive; permissions can keep it from other users.
    Empty means the one in `credentials_file`, else `_INBOX`."""
    connect_timeout_seconds: float = option(5.0, least=0.05, most=3600)
    """Timeout of one connection attempt."""
    request_timeout_seconds: float = option(5.0, least=0.05, most=3600)
    """How long to wait for a reply; after that the outcome is unknown."""
    replicas: int = option(0, least=0, most=5)
    """Copies of every stream: 1, 3 or 5. 0 means one per server of the cluster, at most 3."""

    @property
    def servers(self) -> list[str]:
        """The URLs as a list."""
        return [url.strip() for url in self.nats_url.split(",")]

    @property
    def accept_unsigned(self) -> bool:
        """Whether unsigned requests of earlier versions are accepted."""
        return self.unsigned_requests == "accept"

    @property
    def encrypted(self) -> bool:
        """Whether TLS was requested here; a server that requires it is detected when connecting."""
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
class Served(RoleConfig):
    """What every long-running process has: a port for health and metrics."""

    health_port: int = option(0, least=0, most=65_535)
    """Port that answers health and metrics requests; 0 means none."""
    health_host: str = option("0.0.0.0")
    """Address on which `health_port` listens."""


@dataclass(frozen=True, repr=False)
class WorkerConfig(Served):
    """What one `holdfast worker` does."""

    table = "worker"

    group: str = option(names.DEFAULT_GROUP)
    """Group whose jobs this worker runs."""
    concurrency: int = option(100, least=1, most=100_000)
    """Maximum number of runs that one process executes at the same time."""
    threads: int = option(0, least=0, most=10_000)
    """Threads for plain (`def`) handlers in one process; 0 means one per core. More threads help
    handlers that wait for something and slow down those that compute."""
    pool_processes: int = option(0, least=0, most=1024)
    """Pool size for handlers with `execution="process"`; 0 means one per core. Pool processes start
    when they are first needed."""
    processes: int = option(1, least=1, most=1024)
    """Number of worker processes that share the work."""
    max_runs: int = option(0, least=0)
    """Replace a process after this many runs; 0 means never."""
    low_share: float = option(0.1, least=0.01, most=0.99)
    """The share of starts that runs of low priority get while other runs wait too."""
    release: str = option("")
    """Release of the app whose limits are registered, e.g. a build number. A lower release never
    replaces what a higher one registered."""
    grace_seconds: float = option(0.0, least=0, most=86_400)
    """How long running handlers may continue after SIGTERM; 0 means the liveness profile's
    value."""
    ack_wait_seconds: float = option(5.0, least=0.5, most=3600)
    """How long a run may go without an extension before the server gives it to another worker."""
    extend_seconds: float = option(1.5, least=0.05)
    """How often a worker extends everything it holds; must be below half of `ack_wait_seconds`."""
    blocked_seconds: float = option(60.0, least=0, most=86_400)
    """How long a handler may block the event loop or hold the interpreter lock. Then the node
    enters ERROR, its process is killed, and the crash counts for that run only; 0 means no
    limit."""
    restart: str = option("", choices=("", *RESTARTS))
    """Restart strategy of runs whose worker was lost, where neither the job nor the group sets
    one: `immediately`, `after_grace` or `never`; empty means `immediately`."""
    group_restart: str = option("")
    """Restart strategies of single groups, e.g. `payments=after_grace, rockets=never`. They
    override `app.group` in the code; a job's own strategy wins."""
    crash_limit: int = option(3, least=1, most=1000)
    """Crashes of its process after which a run becomes a dead letter."""
    canary_seconds: float = option(5.0, least=0.5, most=3600)
    """How often a worker sends itself a message to prove that messages still arrive."""
    unknown_payload_seconds: float = option(600.0, least=0, most=86_400)
    """How long a run whose payload has an unknown member is left for workers of another version, as
    during a rollout, before it becomes a dead letter; 0 means at once."""
    short_wait_seconds: float = option(10.0, least=0, most=3600)
    """Retries with a delay up to this stay in the consumer. Longer ones become scheduled messages
    and do not count as lag."""
    cleanup_seconds: float = option(10.0, least=0, most=3600)
    """How long a cancelled handler may clean up. After that its attempt is settled without it; it
    keeps its place until it ends."""
    run_log: str = option("info", choices=("off", "debug", "info", "warning", "error"))
    """Lowest level of the log lines that are kept with their runs (`holdfast runs logs`). With
    `off` nothing is kept, and what handlers print is not captured."""
    settings_file: str = option("")
    """File in which the agent on this host keeps its settings (`settings.json` in its `data_dir`).
    Handlers read them as `ctx.settings`; the file is read again when it changes."""

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
                f"({self.ack_wait_seconds:g}): otherwise one late extension gives the run to "
                "another worker while this one still executes it"
            )


@dataclass(frozen=True, repr=False)
class LivenessConfig(RoleConfig):
    """How fast the death of a node is noticed. The profile provides every number that is 0."""

    table = "liveness"

    profile: str = option("lan", choices=("local", "lan", "wan"))
    """Defaults for one machine, one network or several sites; docs/liveness.md explains each
    number."""
    enabled: str = option("yes", choices=("yes", "no"))
    """Whether coordinators judge this node; `no` is for debugging."""
    cut_off: str = option("stop", choices=("stop", "wait"))
    """What a worker does when it cannot reach NATS for its timeout. `stop`: it is DISCONNECTED,
    takes no runs, lets handlers finish within the grace period, interrupts the rest, and starts
    again as a new node when NATS is back. `wait`: handlers continue, and so does the worker if
    nobody has declared it lost by the time NATS is back."""
    heartbeat_seconds: float = option(0.0, least=0, most=3600)
    """How often a node renews its record."""
    timeout_seconds: float = option(0.0, least=0, most=86_400)
    """Silence after which a node is declared lost."""
    initial_delay_seconds: float = option(0.0, least=0, most=86_400)
    """How long after its start a node is not judged."""
    ping_seconds: float = option(0.0, least=0, most=3600)
    """How often a coordinator pings the node."""
    confirm_seconds: float = option(0.0, least=0, most=3600)
    """How long a node must be proved absent before it is declared lost."""
    ping_misses: int = option(0, least=0, most=1000)
    """How many pings in a row may prove the node absent before it is declared lost, where the
    server cannot be asked about its connection."""
    grace_seconds: float = option(0.0, least=0, most=86_400)
    """Time to finish after SIGTERM, and before `after_grace` starts a lost node's runs again."""


@dataclass(frozen=True, repr=False)
class SchedulerConfig(Served):
    """What one `holdfast scheduler` does."""

    table = "scheduler"

    profile: str = option("lan", choices=tuple(LEASES))
    """How far apart the machines are; provides the times below that are 0."""
    lease_ttl_seconds: float = option(0.0, least=0, most=3600)
    """The leader's lease expires after this long without renewal; 0: by profile (2, 5 or 15)."""
    lease_renew_seconds: float = option(0.0, least=0, most=3600)
    """How often the leader renews its lease; 0: by profile (0.5, 2 or 5)."""
    probe_seconds: float = option(0.0, least=0, most=3600)
    """How often standby schedulers probe the leader's process; 0: by profile (0.1, 0.15 or 1)."""
    probe_misses: int = option(3, least=1, most=100)
    """Failed probes in a row before a standby takes over."""
    overdue_seconds: float = option(1.0, least=0.1, most=3600)
    """A slot that is overdue by this much and not recorded makes a standby ping the leader and take
    over if it does not answer. At three times this value it takes over in any case."""
    missed_after_seconds: float = option(10.0, least=1, most=86_400)
    """A slot that could not be sent within this time counts as missed, and `catch_up` applies.
    Until then it is only late and still fires."""
    clock_tolerance_seconds: float = option(1.0, least=0.05, most=60)
    """A scheduler whose clock differs from the server's by more than this fires nothing."""
    slot_ttl_seconds: int = option(604_800, least=3600)
    """How long a slot's record is kept at most; `slots_kept` may make it shorter."""
    slots_kept: int = option(1000, least=1, most=1_000_000)
    """About how many slots of one schedule are kept; none is removed within its first hour."""
    release: str = option("")
    """Release of the app whose schedules are registered, e.g. a build number. A lower release never
    replaces what a higher one registered."""
    ready_file: str = option("")
    """File that exists while this scheduler is ready."""

    @property
    def lease(self) -> tuple[float, float, float]:
        """TTL, renewal and probe interval, as given or by profile."""
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
                f"lease_renew_seconds ({renew:g}): otherwise one late renewal loses the lead"
            )
        if not all(p.isascii() and p.isdigit() for p in self.release.split(".") if self.release):
            raise ConfigError(f"release {self.release!r} must be numbers with dots: 41 or 1.10.2")


@dataclass(frozen=True, repr=False)
class CoordinatorConfig(Served):
    """What one `holdfast coordinator` does. In `holdfast control` the port is the scheduler's."""

    table = "coordinator"


@dataclass(frozen=True, repr=False)
class WebConfig(Served):
    """What one `holdfast web` does: the API and the pages."""

    table = "web"

    host: str = option("127.0.0.1")
    """Address to listen on. One that other machines can reach requires tokens."""
    port: int = option(8080, least=0, most=65_535)
    """Port to listen on; 0 means any free port."""
    hosts: str = option("")
    """Host names by which clients reach it, separated by commas (`jobs.example.com`,
    `*.example.com`, `*` for any). IP addresses, `localhost` and this machine's own name always
    work; every other name is refused."""
    tokens: str = option("", secret=True)
    """Who may log in: `NAME:ROLE:HASH` as printed by `holdfast web token`, separated by commas."""
    tokens_file: str = option("")
    """File with one such token per line; read again when it changes."""
    session_seconds: float = option(43_200.0, least=60, most=2_592_000)
    """How long a login lasts."""
    rate_per_second: float = option(50.0, least=0, most=1_000_000)
    """Requests per second allowed for one user from one address, with bursts of four seconds'
    worth; 0 means no limit."""
    connections: int = option(1000, least=10, most=1_000_000)
    """Maximum number of open connections. Above it, those that have waited longest for the rest of
    their request are closed."""
    connections_per_address: int = option(200, least=0, most=1_000_000)
    """Maximum number of open connections per address; 0 means no limit. `proxies` are exempt."""
    proxies: str = option("")
    """Addresses of trusted proxies, separated by commas: their `X-Forwarded-For` and
    `X-Forwarded-Proto` headers are used."""
    login_proxies: str = option("")
    """Addresses and networks of proxies that authenticate people (oauth2-proxy, Authelia, …),
    separated by commas. The headers below are trusted only on connections from there."""
    login_user_header: str = option("X-Forwarded-User")
    """Header in which such a proxy names the user."""
    login_groups_header: str = option("X-Forwarded-Groups")
    """Header in which it names the user's groups, separated by commas."""
    login_roles: str = option("")
    """Which role a group has: `GROUP=ROLE`, separated by commas, e.g.
    `sre=admin,dev=operator,*=viewer`; `*` is everybody. The highest role counts."""
    tls_cert: str = option("")
    """File with the certificate to serve, together with `tls_key`."""
    tls_key: str = option("")
    """File with the key of `tls_cert`."""

    def _check_relations(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together: give both or neither")


@dataclass(frozen=True, repr=False)
class RecordConfig(RoleConfig):
    """How long records are kept."""

    table = "record"

    keyed_ttl_seconds: int = option(86_400, least=1)
    """How long the record of a finished run with a key, or of a slot, is kept. During that time the
    same key is recognised as a repeat."""
    keyless_ttl_seconds: int = option(120, least=1)
    """How long the record of any other finished run is kept: meanwhile it guards against repeats.
    Afterwards the run is in the history only."""
    dedup_window_seconds: float = option(120.0, least=0.1, most=86_400)
    """How long the server drops a second message with the same id."""
    dead_days: int = option(30, least=1, most=36_500)
    """How long dead letters are kept."""
    event_days: int = option(7, least=1, most=36_500)
    """How long events are kept."""
    ledger_days: int = option(7, least=1, most=36_500)
    """How long the audit ledger is kept."""
    run_log_days: int = option(7, least=1, most=36_500)
    """How long log lines of runs are kept."""
    run_log_megabytes: int = option(256, least=1, most=1_000_000)
    """Most storage that log lines of all runs take on each server; the oldest are dropped."""
    history_days: int = option(30, least=1, most=36_500)
    """How long runs that have ended are kept in the history, with payload and result."""
    history_megabytes: int = option(1_000, least=1, most=10_000_000)
    """Most megabytes of history; the oldest runs are dropped first. A million small runs take about
    400."""
    once: str = option("nats", choices=("nats", "memory"))
    """Where `app.once` keeps its keys: on the server, or in the memory of each process (for
    development without a server)."""

    def _check_relations(self) -> None:
        for name in ("keyed_ttl_seconds", "keyless_ttl_seconds"):
            if getattr(self, name) < self.dedup_window_seconds:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must not be below dedup_window_seconds "
                    f"({self.dedup_window_seconds:g}): otherwise the server drops a repeat whose "
                    "record is already gone"
                )


@dataclass(frozen=True, repr=False)
class LogConfig(RoleConfig):
    """Log lines of all processes; they go to standard error."""

    table = "log"

    level: str = option("info", choices=("debug", "info", "warning", "error"))
    """Lowest level that is logged."""
    format: str = option("text", choices=("text", "json"))
    """Plain lines, or one JSON object per line."""


def _check_servers(servers: list[str]) -> None:
    for number, url in enumerate(servers, 1):
        scheme, found, rest = url.partition("://")
        if not found or scheme not in ("nats", "tls", "ws", "wss") or not rest.strip("/"):
            raise ConfigError(
                f"nats_url: server {number} of {len(servers)} is not a URL such as "
                "nats://host:4222 (a ',' inside a password must be written %2C)"
            )
