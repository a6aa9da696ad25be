"""Both agents and their replayers in the namespaces of an emulated link, and the baselines' ends.

P is side `a` of the link, D is side `b`.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.wan_baselines import Fetched
from bench.wanlink import WanLink, namespaces
from bench.wanlink.shape import Side
from bench.wanlink.tun import DEVICE
from prfaas.certs import make_certs
from prfaas.errors import PrfaasError
from prfaas.testing.replayer import ReplayCounters, Replayed
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, sign

REPOSITORY = Path(__file__).resolve().parents[1]
P: Side = "a"
D: Side = "b"
P_PORT, D_PORT, METRICS_PORT = 8201, 8101, 9101
PEER, INSTANCE = "p", "p-0"

_LOOPBACK = {P: "127.18.0.1", D: "127.18.0.2"}
_READY_TIMEOUT_S = 60.0
_POLL_S = 0.05
_DEADLINE_S = 100.0


class SiteError(PrfaasError):
    """The system under test did not do what the benchmark needs of it."""

    kind = "site"


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of both agents and of what KvPort costs the engines beside them."""

    agents_s: float
    ports_s: float

    @property
    def total_s(self) -> float:
        return self.agents_s + self.ports_s

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.agents_s - other.agents_s, self.ports_s - other.ports_s)


class LineProcess:
    """A process in a namespace that answers each line of JSON with one; ends with the link."""

    def __init__(self, link: WanLink, side: Side, argv: list[str], log: IO[bytes]) -> None:
        self._process = link.run_in(
            side,
            [sys.executable, *argv],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self._name = argv[1]
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_line(self) -> str:
        return self._read()

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._read())
        return found

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Raises SiteError if it has ended."""
        self.send(command)
        return self.answer()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SiteError(f"{self._name} ended; the end of its log:\n{tail(self._log.name)}")
        return line.decode()


class Baseline:
    """One kind of baseline: its server at P and its client at D."""

    def __init__(self, link: WanLink, kind: str, directory: Path) -> None:
        self._log = (directory / f"{kind}.log").open("wb")
        module = ["-m", "bench.wan_baselines"]
        address = link.address(P)
        self._server = LineProcess(link, P, [*module, f"{kind}-server", address], self._log)
        port = self._server.first_line().strip()
        self._client = LineProcess(link, D, [*module, f"{kind}-client", address, port], self._log)

    def fetch(self, nbytes: int, connections: int = 1, *, fresh: bool = False) -> Fetched:
        found = self._client.ask({"nbytes": nbytes, "connections": connections, "fresh": fresh})
        return Fetched(**found)

    def cpu_s(self) -> float:
        """Of both ends so far."""
        return process_cpu_s(self._server.pid) + process_cpu_s(self._client.pid)

    def close(self) -> None:
        self._log.close()


class WanSite:
    """Agents and replayers of one pair; a context manager. The processes end with the link."""

    def __init__(self, link: WanLink, directory: Path, tape: Path, *, plain: bool = False) -> None:
        """`plain`: no TLS and no codec. `directory` must be private: keys lie in it."""
        self._link = link
        self._directory = directory
        self._tape = tape
        self._plain = plain
        self._key = secrets.token_hex(32)
        self._agents: dict[Side, subprocess.Popen[bytes]] = {}
        self._replayers: dict[Side, LineProcess] = {}
        self._logs: list[IO[bytes]] = []
        self._seed = 0

    def __enter__(self) -> WanSite:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._agents.values():
            process.terminate()
        for process in self._agents.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        for log in self._logs:
            log.close()

    def fetch(self, tokens: int, *, seed: int | None = None) -> Replayed:
        """One session. Raises SiteError unless every byte came from P and is right."""
        self.begin_fetch(tokens, seed=seed)
        return self.end_fetch()

    def begin_fetch(self, tokens: int, *, seed: int | None = None) -> None:
        """`seed`: of the prompt; by default one that no session had before."""
        self._seed += 1
        command = {
            "do": "fetch",
            "params": self._params(),
            "tokens": tokens,
            "seed": self._seed if seed is None else seed,
        }
        self._replayers[D].send(command)

    def end_fetch(self) -> Replayed:
        found = Replayed(**self._replayers[D].answer())
        if found.status != "staged" or not found.exact:
            log = tail(self._directory / "d-agent.log")
            raise SiteError(f"a session did not come whole and right: {found}\n{log}")
        return found

    def received_wire_bytes(self) -> float:
        """KV bytes that D has received, frame headers included, since its start."""
        return self._metric(D, "prfaas_agent_wire_bytes_total")

    def cpu(self) -> Cpu:
        """So far."""
        agents = sum(process_cpu_s(process.pid) for process in self._agents.values())
        ports = 0.0
        for counters in self.counters().values():
            ports += counters.process_cpu_s - counters.engine_cpu_s
        return Cpu(agents, ports)

    def agent_cpu_s(self) -> dict[Side, float]:
        return {side: process_cpu_s(process.pid) for side, process in self._agents.items()}

    def counters(self) -> dict[Side, ReplayCounters]:
        """Of both replayers."""
        return {
            side: ReplayCounters(**replayer.ask({"do": "counters"}))
            for side, replayer in self._replayers.items()
        }

    def congestion_control(self) -> str:
        """Of P's connections to D, read back from the kernel: `bbr x5`."""
        found: dict[str, int] = {}
        for line in self._ss("-Htin", f"sport = :{P_PORT}").splitlines():
            if line[:1].isspace() and (words := line.split()):
                found[words[0]] = found.get(words[0], 0) + 1
        return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))

    def cut_busiest(self) -> bool:
        """Reset the connection with the most bytes waiting at P; False where none has any."""
        busiest, port = 0, ""
        for line in self._ss("-Htn", f"sport = :{P_PORT}").splitlines():
            words = line.split()
            if len(words) >= 5 and int(words[2]) > busiest:
                busiest, port = int(words[2]), words[4].rpartition(":")[2]
        if port:
            self._ss("-KHtn", f"sport = :{P_PORT} and dport = :{port}")
        return bool(port)

    # --- start ---

    def _start(self) -> None:
        addresses = add_loopback(self._link) if self._plain else self._tls_addresses()
        prefill = {
            "peer": PEER,
            "instance": INSTANCE,
            "host": addresses[P],
            "port": P_PORT,
            "socket": str(self._directory / "p.sock"),
            "metrics_port": METRICS_PORT,
            **self._section(P),
        }
        instance = {"name": INSTANCE, "address": f"{addresses[P]}:{P_PORT}"}
        agent = {
            "name": "d-agent",
            "host": addresses[D],
            "port": D_PORT,
            "socket": str(self._directory / "d.sock"),
            "metrics_port": METRICS_PORT,
            "transfer_keys": [self._key],
            # No bursts of the link meter: they would hit the baselines too.
            "probe_bytes": 0,
            "peers": [{"name": PEER, "instances": [instance]}],
            **self._section(D),
        }
        if not self._plain:
            prefill["authorised"] = [{"identity": "d"}]
            instance["tls_name"] = "p"
        self._run_agent(P, "prefill", prefill)
        self._run_agent(D, "agent", agent)
        for side in (P, D):
            socket = self._directory / f"{_word(side)}.sock"
            self._until(socket.exists, _READY_TIMEOUT_S, f"{socket.name}")
            log = self._open_log(f"{_word(side)}-replayer")
            argv = ["-m", "prfaas.testing.replayer", "--socket", str(socket)]
            self._replayers[side] = LineProcess(
                self._link, side, [*argv, "--tape", str(self._tape)], log
            )
        self._until(self._paired, _READY_TIMEOUT_S, "the pair")

    def _tls_addresses(self) -> dict[Side, str]:
        make_certs(self._directory / "tls", ("p", "d"), days=1)
        return {side: self._link.address(side) for side in (P, D)}

    def _section(self, side: Side) -> dict[str, Any]:
        """What TLS, or doing without TLS and codec, adds to a section."""
        if self._plain:
            return {"codecs": ["raw"]}
        directory = self._directory / "tls"
        pair = directory / _word(side)
        files = {"cert": pair / "cert.pem", "key": pair / "key.pem", "ca": directory / "ca.pem"}
        return {"tls": {name: str(path) for name, path in files.items()}}

    def _run_agent(self, side: Side, command: str, section: dict[str, Any]) -> None:
        file = self._directory / f"{command}.yaml"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            yaml.safe_dump({"config_version": 1, command: section}, out)
        log = self._open_log(f"{_word(side)}-agent")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PRFAAS_")}
        self._agents[side] = self._link.run_in(
            side,
            [sys.executable, "-m", "prfaas", command, "--config", str(file)],
            environment,
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )

    def _open_log(self, name: str) -> IO[bytes]:
        log = (self._directory / f"{name}.log").open("wb")
        self._logs.append(log)
        return log

    def _paired(self) -> bool:
        try:
            return self._metric(D, "prfaas_agent_ready_instances") == 1
        except OSError:
            return False

    # --- looking in ---

    def _params(self) -> dict[str, Any]:
        params = TransferParams(
            version=PARAMS_VERSION,
            transfer_id=secrets.token_hex(8),
            plan=(PlanStep(PEER, INSTANCE),),
            on_failure="reject",
            quality="exact",
            deadline_s=_DEADLINE_S,
            salt="",
            expires=time.time() + _DEADLINE_S,
        )
        return sign(params, self._key.encode()).to_dict()

    def _metric(self, side: Side, name: str) -> float:
        """The sum of all samples of that name."""
        connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=10)
        try:
            with namespaces.entered(self._link.namespace(side)):
                connection.connect()
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        families = text_string_to_metric_families(text)
        return sum(s.value for family in families for s in family.samples if s.name == name)

    def _ss(self, flags: str, expression: str) -> str:
        command = self._link.command_in(P, ["ss", flags, *expression.split()])
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout

    def _until(self, holds: Any, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            for side, process in self._agents.items():
                if process.poll() is not None:
                    log = tail(self._directory / f"{_word(side)}-agent.log")
                    raise SiteError(f"the agent of {_word(side).upper()} ended:\n{log}")
            if time.monotonic() > deadline:
                log = tail(self._directory / "d-agent.log")
                raise SiteError(f"waited {timeout_s:.0f} s for {what}; D's agent says:\n{log}")
            time.sleep(_POLL_S)


def add_loopback(link: WanLink) -> dict[Side, str]:
    """Give both sides an address in 127/8 on the link, for ports that without TLS bind loopback.

    127.0.0.1 stays each side's own.
    """
    for side, address in _LOOPBACK.items():
        name = link.namespace(side)
        with namespaces.entered(name):
            for device in ("all", DEVICE):
                Path(f"/proc/sys/net/ipv4/conf/{device}/route_localnet").write_text("1")
        namespaces.run_ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
        namespaces.run_ip("-n", name, "addr", "add", "127.0.0.1/32", "dev", "lo")
        namespaces.run_ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
    return dict(_LOOPBACK)


@contextmanager
def baseline(link: WanLink, kind: str, directory: Path) -> Iterator[Baseline]:
    """`raw` or `grpc`."""
    found = Baseline(link, kind, directory)
    try:
        yield found
    finally:
        found.close()


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all its threads, to the nanosecond."""
    clock_of_process = (~pid << 3) | 2  # MAKE_PROCESS_CPUCLOCK, linux/posix-timers_types.h
    return time.clock_gettime(clock_of_process)


def tail(path: str | Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(Path(path).read_text(errors="replace").splitlines()[-lines:])


def _word(side: Side) -> str:
    return "p" if side == P else "d"
