"""The driver of a run on a Ray cluster: places, starts and ends the trainer and its servers.

Ray provides machines, GPUs and one actor per command (actor.py). An actor runs the command that a
user would run by hand: `torchtune-ext run` for the trainer, and `torchtune-ext serve` for a vLLM
server. So ranks, signals and exit statuses behave as in every other run. The run ends with its
trainer or with any of its servers. The driver does not restart anything.
"""

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from torchtune_ext import __version__
from torchtune_ext.cluster import actor
from torchtune_ext.run.errors import RunFailure, UsageError, describe_error
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.stop import SIGNAL_NAMES

# Kind of resource -> (Ray's name, name in messages).
RESOURCE_NAMES = {"gpus": ("GPU", "GPUs"), "cpus": ("CPU", "cores")}
PLACEMENT_TIMEOUT_S = 30.0  # default of --wait: seconds to wait for free resources
ACTOR_TIMEOUT_S = 60.0  # seconds for Ray to start the actors on their machines
POLL_S = 0.2  # seconds between two polls of the commands' output
# Seconds without an answer after which an actor counts as dead. The driver counts polls, so that
# the timeout does not expire while the driver itself is stopped (Ctrl-Z).
SILENCE_TIMEOUT_S = 60.0
SERVER_END_S = 10.0  # seconds between SIGTERM and SIGKILL of a server
EXIT_TIMEOUT_S = 30.0  # seconds for killed commands to exit
LAST_LINES = 20  # last output lines shown in an error
NETWORK_TRANSFER = {"gpus": "nccl", "cpus": "gloo"}  # kind of resource -> `engine.transfer` between machines


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources that a run requests from the cluster."""

    kind: str  # "gpus" or "cpus"
    ranks: int  # ranks of the trainer, each with one GPU or core, all on one machine
    servers: int
    per_server: int = 1  # GPUs or cores of a server

    def bundles(self) -> list[int]:
        """Returns the GPUs or cores of each bundle: first the trainer's, then each server's."""
        # Ray places a bundle on one machine, which trainer and servers each require.
        return [self.ranks] + [self.per_server] * self.servers

    def flags(self) -> str:
        """Returns the command-line flags of this request."""
        return f"--train-{self.kind} {self.ranks} --engine-{self.kind} {self.servers * self.per_server}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, as requested by the command."""

    recipe: str
    config: str  # as given by the user
    overrides: tuple[str, ...]  # key=value
    request: ResourceRequest
    folder: str  # working folder on each machine
    required_path: str  # path that must exist on each machine: the folder, or the user's own config in it
    variables: Mapping[str, str]  # environment of trainer and servers, including the servers' API key
    grace_s: float  # seconds between a signal and SIGKILL of the trainer
    wait_s: float  # seconds to wait for free resources


@dataclass(eq=False, slots=True)
class Member:
    """A command of the run on a machine of the cluster."""

    title: str
    address: str  # address of the machine
    actor: Any
    log: str = ""  # log file of the command, on its machine
    port: int = 0  # a free port on its machine
    status: int | None = None  # exit status; None while running, or if the actor died
    lost_reason: str = ""  # why the actor counts as dead; "" if it does not
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    partial_line: bytes = b""  # unfinished last line of the output
    pending_call: Any = None  # Ray's handle of a pending answer
    silent_s: float = 0.0  # seconds since the last answer

    @property
    def is_running(self) -> bool:
        return self.status is None and not self.lost_reason

    def exit_summary(self) -> str:
        """Returns how the command ended, with its last output."""
        if self.lost_reason:
            return f"{self.title} crashed: {self.lost_reason}"
        text = "; its last output:\n" + "\n".join(f"    {line}" for line in self.tail) if self.tail else ""
        return f"{self.title} ended with status {self.status}{text}"


class Driver:
    """Runs a plan on a cluster, from its placement to its end. Prints to `out` and `err`."""

    def __init__(self, ray: Any, plan: Plan, address: str, out: TextIO, err: TextIO):
        self.ray, self.plan, self.address, self.out, self.err = ray, plan, address, out, err
        self.members: list[Member] = []  # first the trainer, then the servers
        self.cause = ""  # why the run ends early, other than by a signal
        self._group: Any = None  # Ray's placement group
        self._started = False  # whether commands may be running
        self._signals: list[int] = []  # received signals
        self._signals_sent = 0  # signals already forwarded to the trainer

    def run(self) -> int:
        """Runs to the end and returns the exit status of the trainer.

        Raises:
            UsageError: If the cluster has not enough resources, or a machine is unsuitable.
            RunFailure: If a server, the trainer, or one of their machines crashed.
        """
        with self._capture_signals():
            try:
                if not self._wait_for_placement():
                    return 128 + self._signals[0]
                self._make_members()
                self._start()
                while self.members[0].is_running:
                    self._poll()
                    self._check_run()
            finally:
                # The servers get time to exit. Removing the group kills all actors.
                if self._started:
                    self._end_all()
                if self._group is not None:
                    self.ray.util.remove_placement_group(self._group)
        if self.cause:
            raise RunFailure(self.cause)
        status = self.members[0].status
        # Without a cause and without a status, a signal has ended the run.
        return 128 + self._signals[0] if status is None else status

    @contextmanager
    def _capture_signals(self) -> Iterator[None]:
        """Records signals while the body runs, instead of acting on them."""
        # Ray's own signal handlers are restored afterwards.
        before = {number: signal.getsignal(number) for number in SIGNAL_NAMES}
        for number, handler in before.items():
            # An ignored signal (nohup) stays ignored.
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- placement ---------------------------------------------------------------------------------

    def _resource_summary(self) -> str:
        """Returns the cluster's resources: "12 GPUs on 2 machines (10.0.0.1: 8, 10.0.0.2: 4)"."""
        resource, name = RESOURCE_NAMES[self.plan.request.kind]
        nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
        totals = [int(node["Resources"][resource]) for node in nodes]
        each = ", ".join(f"{node['NodeManagerAddress']}: {total}" for node, total in zip(nodes, totals, strict=True))
        machines = f"{len(nodes)} machine{'s' * (len(nodes) != 1)}"
        return f"{sum(totals)} {name} on {machines}" + (f" ({each})" if each else "")

    def _wait_for_placement(self) -> bool:
        """Waits for free resources in the cluster. Returns False if a signal arrived first.

        Raises:
            UsageError: If the resources are not free within `wait_s`.
        """
        request, wait_s = self.plan.request, self.plan.wait_s
        resource, name = RESOURCE_NAMES[request.kind]
        print_text(format_labels([("ray", f"{self.address}, {self._resource_summary()}")]), self.out)
        # Ray places all bundles of a group or none, which prevents a deadlock between two runs. An
        # autoscaling cluster learns from the pending group which resources are missing.
        bundles = [{resource: amount} for amount in request.bundles()]
        self._group = self.ray.util.placement_group(bundles, strategy="PACK")
        give_up_at = time.monotonic() + wait_s
        while not self._group.wait(min(1.0, wait_s)):
            if self._signals:
                return False
            if time.monotonic() > give_up_at:
                free = int(self.ray.available_resources().get(resource, 0))
                parts = ", ".join(map(str, request.bundles()))
                raise UsageError(
                    f"{request.flags()}: {parts} {name} (each number on one machine) were not free within {wait_s:g} s. "
                    f"The Ray cluster at {self.address} has {self._resource_summary()}; {free} are free. Request less, wait "
                    "longer with --wait SECONDS (also for machines that join), or run `ray status` to see who uses them"
                )
        return True

    def _make_members(self) -> None:
        """Starts an actor for each command.

        Raises:
            UsageError: If a machine is unsuitable.
            RunFailure: If a machine has left the cluster.
        """
        plan = self.plan
        # Pickled by value, so that a machine with another version of torchtune_ext can report it.
        self.ray.cloudpickle.register_pickle_by_value(actor)
        remote = self.ray.remote(actor.Actor)
        where = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        for bundle, amount in enumerate(plan.request.bundles()):
            title, address = f"server {bundle - 1}" if bundle else "the trainer", addresses.get(where[bundle])
            if address is None:
                raise RunFailure(f"the machine of {title} left the cluster before the run started; start the run again")
            # By default Ray requests one CPU per actor, but the bundle of a GPU run has none.
            options = {"num_gpus": amount, "num_cpus": 0} if plan.request.kind == "gpus" else {"num_cpus": amount}
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
            handle = remote.options(scheduling_strategy=strategy, max_restarts=0, **options).remote()
            self.members.append(Member(f"{title} on {address}", address, handle))
        questions = [each.actor.check_machine.remote(plan.required_path, __version__) for each in self.members]
        for each, (why, each.log, each.port) in zip(self.members, self._answers(questions), strict=True):
            if why:
                raise UsageError(f"{each.title}: {why}; all machines of the cluster need the same files and versions")

    def _answers(self, questions: Sequence[Any]) -> list[Any]:
        """Returns the members' answers to `questions`, one each, in order.

        Raises:
            RunFailure: If an actor does not answer.
        """
        answers, give_up_at = [], time.monotonic() + ACTOR_TIMEOUT_S
        for each, question in zip(self.members, questions, strict=True):
            try:
                answers.append(self.ray.get(question, timeout=max(0.1, give_up_at - time.monotonic())))
            except self.ray.exceptions.RayError as error:
                raise RunFailure(f"{each.title} could not be started: {describe_error(error)}") from error
        return answers

    # -- commands ----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts all commands. Raises RunFailure if an actor cannot start one."""
        plan, (trainer, *servers) = self.plan, self.members
        hosts, transfer = choose_transfer(trainer.address, [each.address for each in servers], plan.request.kind)
        addresses = [f"http://{host}:{each.port}" for host, each in zip(hosts, servers, strict=True)]
        ranks = plan.request.ranks
        launch = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
        settings = ["--config", plan.config, *plan.overrides, *engine_overrides(addresses, transfer)]
        commands = [["-m", "torchtune_ext", "run", *launch, plan.recipe, *settings]]
        for i, (server, host, address) in enumerate(zip(servers, hosts, addresses, strict=True)):
            own = engine_overrides([address], transfer)
            commands.append(server_args(plan.recipe, plan.config, plan.overrides, own, host))
            lives = f"{address} on {server.address}, its log there: {server.log}"
            print_text(format_labels([(f"server {i}", lives)]), self.out)
        print_text(format_labels([("trainer", f"{ranks} rank{'s' * (ranks > 1)} on {trainer.address}")]), self.out)
        variables = {**plan.variables, "RAY_ADDRESS": self.address}
        self._started = True
        grace_periods_s = [plan.grace_s] + [SERVER_END_S] * len(servers)
        questions = [
            each.actor.start.remote(words, variables, plan.folder, seconds)
            for each, words, seconds in zip(self.members, commands, grace_periods_s, strict=True)
        ]
        self._answers(questions)

    def _poll(self) -> None:
        """Polls every actor for the output and the exit status of its command."""
        running = [each for each in self.members if each.is_running]
        for each in running:
            # Each actor has at most one pending call.
            each.pending_call = each.pending_call or each.actor.poll_output.remote()
        time.sleep(POLL_S)
        ready, _ = self.ray.wait([each.pending_call for each in running], num_returns=len(running), timeout=0)
        for each in running:
            each.silent_s += POLL_S
            if each.pending_call in ready:
                self._handle_output(each)
            if each.silent_s > SILENCE_TIMEOUT_S:
                each.lost_reason = each.lost_reason or f"no answer in {SILENCE_TIMEOUT_S:g} s"

    def _handle_output(self, member: Member) -> None:
        """Stores the answer of an actor, and prints the trainer's output."""
        question, member.pending_call = member.pending_call, None
        try:
            output, member.status = self.ray.get(question)
        except self.ray.exceptions.ActorUnavailableError:
            return  # the failure may be temporary
        except self.ray.exceptions.RayError as error:
            member.lost_reason = describe_error(error)
            return
        member.silent_s = 0.0
        *lines, begun = (member.partial_line + output).split(b"\n")
        # A progress bar rewrites its line. Only its newest state is kept.
        member.partial_line = begun[begun.rfind(b"\r") + 1 :]
        if member.status is not None and member.partial_line:
            lines.append(member.partial_line)
        for line in (line.decode(errors="replace") for line in lines):
            member.tail.append(line)
            if member is self.members[0]:
                print_text(line, self.out)

    def _check_run(self) -> None:
        """Forwards signals, and ends the run if the trainer or a server crashed."""
        trainer, *servers = self.members
        for number in self._signals[self._signals_sent :]:
            # The second signal kills the trainer without a grace period.
            self._tell(trainer, number, 0.0 if self._signals_sent else self.plan.grace_s)
            self._signals_sent += 1
        # A server's exit does not matter after the trainer's exit, or after a signal.
        gone = trainer if trainer.lost_reason else next((each for each in servers if not each.is_running), None)
        if gone and trainer.status is None and not self.cause and not self._signals_sent:
            self.cause = gone.exit_summary()
            print_text(f"ray: {self.cause.splitlines()[0]}; the run ends", self.err)
            self._tell(trainer, signal.SIGTERM, self.plan.grace_s)

    def _end_all(self) -> None:
        """Ends the running commands and waits; the placement group ends the actors later."""
        for each in self.members:
            self._tell(each, signal.SIGTERM, 0.0 if each is self.members[0] else SERVER_END_S)
        give_up_at = time.monotonic() + SERVER_END_S + EXIT_TIMEOUT_S
        while any(each.is_running for each in self.members) and time.monotonic() < give_up_at:
            self._poll()
        for each in self.members:
            if each.is_running:
                text = f"ray: {each.title} does not end; Ray kills its actor, and the guard kills its processes"
                print_text(text, self.err)

    def _tell(self, member: Member, number: int, seconds: float) -> None:
        if member.is_running:
            member.actor.send_signal.remote(number, seconds)


def choose_transfer(trainer: str, servers: Sequence[str], kind: str) -> tuple[list[str], str]:
    """Returns the host on which each server listens, and `engine.transfer`.

    Args:
        trainer: Address of the trainer's machine.
        servers: Addresses of the servers' machines.
        kind: "gpus" or "cpus".
    """
    # On rank 0's machine servers read its memory, and listen on loopback only.
    if all(server == trainer for server in servers):
        return ["127.0.0.1"] * len(servers), "shm"
    # If one server is on another machine, all servers get their weights over the network.
    return list(servers), NETWORK_TRANSFER[kind]


def server_args(recipe: str, config: str, words: Sequence[str], settings: Sequence[str], host: str) -> list[str]:
    """Returns Python's arguments that start a server; `settings` come from `engine_overrides`."""
    command = ["-m", "torchtune_ext", "serve", "--config", config, "--recipe", recipe, "--host", host]
    return [*command, *words, *settings]


def engine_overrides(addresses: Sequence[str], transfer: str) -> list[str]:
    """Returns the overrides that connect trainer and servers; they come after the run's own."""
    address = addresses[0] if len(addresses) == 1 else f"[{','.join(addresses)}]"
    # A config may place the engine on the trainer's machine, but Ray assigns the GPUs.
    own = ("engine.devices=null", "engine.count=null", "engine.sleep=false")
    return [f"engine.address={address}", f"engine.transfer={transfer}", *own]
