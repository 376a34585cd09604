"""Which ranks share layers and which hold runs of layers, where the user leaves it to the engine."""

from __future__ import annotations

from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.split import check_parallel

HOW = "start it with mpirun -n {0}, or without mpirun: engine.serve then starts its ranks itself"


def choose_split(
    config: EngineConfig, model_config: ModelConfig, num_ranks: int, ranks_per_host: int
) -> tuple[int, int, str]:
    """(tensor_parallel_size, pipeline_parallel_size, why), for so many ranks.

    What is asked for, if it makes that many. Of what is left open, the most ranks that can share a layer, since they
    shorten each token's time, where stages do not; but a layer is never shared between hosts, whose links are slow.
    With --split memory and nothing else, each rank is a stage.

    Raises:
        ConfigError: no split of so many ranks is possible, or not the one that is asked for; says which are.
    """
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    if config.split == "memory" and num_ranks > 1:
        tp = 1 if tp is None and pp is None else tp
        if pp == 1 or tp == num_ranks:
            raise ConfigError(
                "--split memory: shares layers out among stages, and there is but one; give --pipeline-parallel-size 2 "
                "or more, or leave out --split"
            )
    fixed = (tp or 1) * (pp or 1)
    if (tp is not None and pp is not None and fixed != num_ranks) or num_ranks % fixed:
        asked = " × ".join(
            f"--{name.replace('_', '-')} {size}"
            for name, size in (("tensor_parallel_size", tp), ("pipeline_parallel_size", pp))
            if size is not None
        )
        there = "there is one rank" if num_ranks == 1 else f"MPI has started {num_ranks} ranks"
        raise ConfigError(f"{asked} does not make the number of ranks: {there}; {HOW.format(fixed)}")
    if tp is None and pp is not None:
        tp = num_ranks // pp
    if tp is not None:
        pp = num_ranks // tp
        check_parallel(model_config, ParallelConfig(0, tp, pp))
        return tp, pp, "as asked for" if num_ranks > 1 else ""
    if num_ranks == 1:
        return 1, 1, ""
    passed: list[str] = []
    for tp in (size for size in range(num_ranks, 0, -1) if num_ranks % size == 0):
        pp = num_ranks // tp
        if tp > ranks_per_host:
            passed.append(f"TP {tp}: a host has {ranks_per_host} ranks")
            continue
        try:
            check_parallel(model_config, ParallelConfig(0, tp, pp))
        except ConfigError as error:
            passed.append(f"TP {tp} × PP {pp}: " + "; ".join(line.strip() for line in str(error).splitlines()[1:]))
            continue
        why = "the most ranks that can share a layer, which shortens the time of a token"
        return tp, pp, "; ".join([why, *(f"not {reason}" for reason in passed)])
    raise ConfigError(f"{num_ranks} ranks cannot share this model:\n  " + "\n  ".join(passed))
