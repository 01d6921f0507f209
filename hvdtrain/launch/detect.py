"""Which launcher started this process, and as which rank: a pure function of the environment and the flags.

Every launcher is one row of names in `LAUNCHERS`, in the order in which they are asked; a new cluster is a new row. All
fields come from one row: mixing two launchers' variables is how a job silently becomes N jobs of size one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from hvdtrain.errors import LaunchError
from hvdtrain.launch import slurm
from hvdtrain.launch.world import World


@dataclasses.dataclass(frozen=True)
class ManualFlags:
    """What the user says on the command line; it goes before everything that a launcher says.

    `init_method` is `tcp://HOST:PORT`, `file:///PATH` or `env://`. With `init_method` alone the ranks still come from
    the launcher: that is how to tell a bare mpirun where the root is.
    """

    init_method: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where the ranks find each other.

    kind: "single" (one rank, nobody to meet), "tcp" (rank 0 listens on host:port), "agent" (torchrun's agent already
    serves a store on host:port), "file" (rank 0 writes its address to `path`), "horovodrun" (rank 0 puts its address
    into the key-value server of horovodrun at host:port), "mpi" (rank 0's address goes through MPI or a local file).
    """

    kind: str
    host: str | None = None
    port: int | None = None
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class Detected:
    """What the environment tells. A field is None where only a meeting of the ranks can tell (see `open_rendezvous`).

    job: text that is the same on all ranks of this job and differs from other jobs as far as the launcher tells it.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    meeting: Meeting = Meeting("single")
    job: str = ""

    @property
    def world(self) -> World | None:
        """The complete place of this process, or None while a field is unknown."""
        if self.local_rank is None or self.local_size is None or self.node_rank is None or self.num_nodes is None:
            return None
        return World(self.rank, self.size, self.local_rank, self.local_size, self.node_rank, self.num_nodes)

    def fields(self) -> dict[str, int | None]:
        """The place as a plain mapping, unknown fields as None: what `hvdtrain world --json` prints."""
        names = (field.name for field in dataclasses.fields(World))
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A row of names. Where a field has several names, the first that is set is taken.

    marks: any of these, set and not empty, says that this launcher started the process.
    required: fields that must be there once the launcher is recognised, each by at least one of its names.
    job: variables whose values together name the job.
    """

    name: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    required: tuple[str, ...] = ("rank", "size")
    job: tuple[str, ...] = ()
    # Says no where the marks alone would mistake another launcher's variables for this one's.
    applies: Callable[[Mapping[str, str]], bool] = lambda environ: True


def _hydra_applies(environ: Mapping[str, str]) -> bool:
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE for the MPI library; Hydra always adds MPI_LOCALRANKID.
    return "MPI_LOCALRANKID" in environ or not slurm.is_job_step(environ)


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        name="torchrun",  # and torch.distributed.launch, which runs torchrun underneath
        marks=("TORCHELASTIC_RUN_ID",),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        num_nodes=("GROUP_WORLD_SIZE",),
        required=("rank", "size", "local_rank", "local_size"),
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        name="horovodrun",
        marks=("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        num_nodes=("HOROVOD_CROSS_SIZE",),
        required=("rank", "size", "local_rank", "local_size"),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        # Open MPI and Spectrum MPI; `horovodrun --mpi` becomes mpirun and leaves no mark of its own.
        # OMPI_COMM_WORLD_NODE_RANK is the rank among all local processes, not the index of the node.
        name="mpirun",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        required=("rank", "size", "local_rank", "local_size"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_precondition_transports"),
    ),
    Launcher(
        name="mvapich2",
        marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        required=("rank", "size", "local_rank", "local_size"),
    ),
    Launcher(
        name="hydra",  # mpiexec of MPICH and of Intel MPI
        marks=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        required=("rank", "size", "local_rank", "local_size"),
        applies=_hydra_applies,
    ),
    Launcher(
        name="jsrun",
        marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        required=("rank", "size", "local_rank"),
        job=("LSB_JOBID", "JSM_NAMESPACE"),
    ),
    Launcher(
        name="srun",
        marks=("SLURM_PROCID",),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES",),
        required=("rank", "size", "local_rank"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        applies=slurm.is_job_step,
    ),
    Launcher(
        name="manual",
        marks=("RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
)

PLACES = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")


def detect(environ: Mapping[str, str], flags: ManualFlags | None = None) -> Detected:
    """Find the launcher and this process's place. Pure: reads nothing but its arguments.

    Precedence: flags > torchrun > horovodrun > Open MPI > MVAPICH2 > Hydra > jsrun > srun > bare RANK and WORLD_SIZE >
    none.

    Raises:
        LaunchError: a launcher's variables are half set (names the missing one), not numbers, or out of range.
    """
    flags = flags or ManualFlags()
    if flags.rank is not None or flags.world_size is not None:
        return _from_flags(environ, flags)
    detected = _from_environment(environ)
    if flags.init_method is not None and flags.init_method != "env://":
        if detected.launcher == "none":
            raise LaunchError(
                f"--init-method {flags.init_method} says where to meet but not who this is: pass --rank and "
                "--world-size"
            )
        detected = dataclasses.replace(detected, meeting=_meeting_from_url(flags.init_method, detected.size))
    elif flags.init_method == "env://" and detected.launcher == "none":
        raise LaunchError(
            "--init-method env:// reads the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, but RANK is "
            "not set: set them, or pass --rank and --world-size"
        )
    if flags.local_rank is not None and detected.local_rank is None:
        detected = dataclasses.replace(detected, local_rank=flags.local_rank)
    return _checked(detected)


def _from_flags(environ: Mapping[str, str], flags: ManualFlags) -> Detected:
    if flags.rank is None or flags.world_size is None:
        given, missing = ("--world-size", "--rank") if flags.rank is None else ("--rank", "--world-size")
        raise LaunchError(f"{given} is given without {missing}: a process started by hand needs both")
    url = flags.init_method or "env://"
    if flags.world_size == 1:
        meeting = Meeting("single")
    elif url == "env://":
        meeting = _master_meeting(environ, "--init-method env://")
    else:
        meeting = _meeting_from_url(url, flags.world_size)
    detected = Detected("manual", flags.rank, flags.world_size, local_rank=flags.local_rank, meeting=meeting)
    return _checked(detected)


def _from_environment(environ: Mapping[str, str]) -> Detected:
    for row in LAUNCHERS:
        if any(environ.get(mark) for mark in row.marks) and row.applies(environ):
            return _from_row(environ, row)
    return Detected("none", 0, 1, 0, 1, 0, 1)


def _from_row(environ: Mapping[str, str], row: Launcher) -> Detected:
    places: dict[str, int] = {}
    for place in PLACES:
        names: tuple[str, ...] = getattr(row, place)
        name = next((name for name in names if environ.get(name)), None)
        if name is not None:
            places[place] = _integer(environ, name)
        elif place in row.required:
            present = next(mark for mark in row.marks if environ.get(mark))
            raise LaunchError(
                f"{row.name}: {present} is set but {' or '.join(names)} is not, so this process's {place} is unknown. "
                f"Start it through {row.name} itself, unset {present} to run without it, "
                "or pass --rank and --world-size"
            )
    if row.name == "srun" and environ.get("SLURM_STEP_TASKS_PER_NODE"):
        per_node = slurm.expand_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        node_rank = places.get("node_rank", 0 if len(per_node) == 1 else None)
        if node_rank is not None and node_rank < len(per_node):
            places["local_size"] = per_node[node_rank]
            places.setdefault("num_nodes", len(per_node))
    job = "/".join([row.name, *(environ[name] for name in row.job if environ.get(name))])
    detected = dataclasses.replace(
        Detected(row.name, job="" if job == row.name else job),
        **places,  # type: ignore[arg-type]
    )
    if detected.size > 1:
        detected = dataclasses.replace(detected, meeting=_meeting(environ, detected))
    return _checked(detected)


def _meeting(environ: Mapping[str, str], detected: Detected) -> Meeting:
    """Where the ranks of this launcher meet, from its own variables."""
    launcher = detected.launcher
    if launcher == "torchrun":
        kind = "agent" if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "tcp"
        return dataclasses.replace(_master_meeting(environ, "torchrun"), kind=kind)
    if launcher == "manual":
        return _master_meeting(environ, "a process started by hand with RANK and WORLD_SIZE")
    if launcher == "horovodrun":
        if environ.get("HOROVOD_ELASTIC") == "1":
            raise LaunchError(
                "horovodrun is running elastically (HOROVOD_ELASTIC=1), which hvdtrain does not support: start it with "
                "-np and without --min-np, --max-np and --host-discovery-script"
            )
        if environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
            port = _integer(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
            return Meeting("horovodrun", environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port)
        if environ.get("MASTER_ADDR"):
            return _master_meeting(environ, "horovodrun")
        raise LaunchError(
            "horovodrun: HOROVOD_RANK is set but HOROVOD_GLOO_RENDEZVOUS_ADDR is not, so the other ranks cannot be "
            "found. Start the job through horovodrun --gloo itself, or set MASTER_ADDR and MASTER_PORT"
        )
    if environ.get("MASTER_ADDR"):
        port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else _job_port(detected)
        return Meeting("tcp", environ["MASTER_ADDR"], port)
    if launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
        if not nodes:
            raise LaunchError(
                "srun: SLURM_PROCID is set but SLURM_STEP_NODELIST is not, so the host of rank 0 is unknown. "
                "Start the job through srun itself, or set MASTER_ADDR and MASTER_PORT"
            )
        port = _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else _job_port(detected)
        return Meeting("tcp", slurm.first_host(nodes), port)
    if launcher == "jsrun":
        return Meeting("tcp", None, _job_port(detected), environ.get("LSB_DJOB_RANKFILE"))
    return Meeting("mpi")


def _master_meeting(environ: Mapping[str, str], who: str) -> Meeting:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{who} needs {' and '.join(missing)}: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
            "port there, or pass --init-method tcp://HOST:PORT"
        )
    return Meeting("tcp", environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT"))


def _meeting_from_url(url: str, size: int) -> Meeting:
    parts = urlsplit(url)
    if size == 1:
        return Meeting("single")
    if parts.scheme == "file":
        if not parts.path or parts.netloc:
            raise LaunchError(f"--init-method {url}: write file:///ABSOLUTE/PATH, with three slashes")
        return Meeting("file", path=parts.path)
    if parts.scheme == "tcp":
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or port is None:
            raise LaunchError(f"--init-method {url}: write tcp://HOST:PORT, the host of rank 0 and a free port there")
        return Meeting("tcp", host, port)
    raise LaunchError(f"--init-method {url}: use tcp://HOST:PORT, file:///PATH or env://")


def _job_port(detected: Detected) -> int:
    """A port that every rank works out alike from the names of the job and the step.

    10000 to 29999 lies below the range from which Linux hands out ports by itself (32768 and up).
    """
    if not detected.job:
        raise LaunchError(
            f"{detected.launcher}: MASTER_ADDR is set but MASTER_PORT is not: set it to a free port on rank 0's host"
        )
    return 10000 + zlib.crc32(detected.job.encode()) % 20000


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value:
        raise LaunchError(f"{name} is not set; it must be a whole number")
    try:
        number = int(value)
    except ValueError:
        raise LaunchError(f"{name}={value!r} is not a whole number") from None
    if name.endswith("_PORT") and not 0 < number < 65536:
        raise LaunchError(f"{name}={value} is not a port: it must be from 1 to 65535")
    return number


def _checked(detected: Detected) -> Detected:
    """Fill in what follows from the rest, and refuse impossible places."""
    if not 0 <= detected.rank < detected.size:
        raise LaunchError(
            f"{detected.launcher}: rank {detected.rank} of {detected.size}: the rank must be from 0 to the size minus 1"
        )
    known: dict[str, int] = {}
    if detected.size == 1:
        # One rank is alone wherever it is; a stray LOCAL_RANK must not make it rank 3 of 1.
        known = {"local_rank": 0, "local_size": 1, "node_rank": 0, "num_nodes": 1}
    elif detected.local_size == detected.size:
        known = {"node_rank": 0, "num_nodes": 1}
    missing = {name: value for name, value in known.items() if getattr(detected, name) is None}
    detected = dataclasses.replace(detected, **missing)  # type: ignore[arg-type]
    _ = detected.world  # raises LaunchError where a complete place is impossible
    return detected
