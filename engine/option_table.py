"""The flags of the engine, one a line of a table: how each is read, and what it means."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.config import EngineConfig
from engine.option_values import Convert, integer, number, switch, text, texts

DEFAULTS = {f.name: f.default for f in fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. Where it is no field of EngineConfig, only the values in served are accepted, and change nothing."""

    name: str  # of the EngineConfig field
    convert: Convert  # from a text of the command line or a value of a config file; ValueError says what is wrong
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    served: tuple[object, ...] = ()  # of a flag that is no field
    instead: str = ""  # for a value that is not served: what there is

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, *self.aliases)

    @property
    def is_field(self) -> bool:
        return self.name in DEFAULTS

    @property
    def shown_default(self) -> str:
        """The default as it would be typed; empty where there is none."""
        default = DEFAULTS.get(self.name, self.served[0] if self.served else None)
        if self.convert is switch:
            return "on" if default else "off"
        return "" if default in (None, (), "") else str(default)


OPTIONS = (
    Option("model", text, "a folder, a .gguf file, a Hugging Face repo id, or starter (SmolLM2-135M-Instruct)"),
    Option("served_model_name", texts, "names accepted as model in requests; the first is the default", metavar="NAME"),
    Option("host", text, "address to listen on; 0.0.0.0 for all interfaces"),
    Option("port", integer, "port to listen on; 0 takes a free one"),
    Option("root_path", text, "path under which a proxy shows the server", metavar="PATH"),
    Option("api_key", texts, "keys of which a client must send one; without any, everybody may ask", metavar="KEY"),
    Option("allowed_origins", texts, "origins of web pages that may call the server (CORS); none", metavar="ORIGIN"),
    Option("chat_template", text, "a Jinja chat template or the file of one, in place of the model's"),
    Option("device", text, "where the model runs; auto: on a GPU if one can run it", metavar="auto|cuda|cpu"),
    Option(
        "cuda_arch",
        text,
        "the kernels of an older kind of GPU, as it would run them; by default those of the GPU that is there",
        metavar="auto|sm_80|sm_86|sm_89|sm_90|sm_100|sm_120",
    ),
    Option(
        "dtype",
        text,
        "type of weights and activations; a CPU takes only float32, which is auto there",
        metavar="auto|float32|bfloat16|float16",
    ),
    Option(
        "kv_cache_dtype",
        text,
        "type of the KV cache; auto: that of activations. The others are of 8 bits, with a scale for each head of each "
        "token, and hold nearly twice the tokens; fp8 is fp8_e4m3",
        metavar="auto|fp8|fp8_e4m3|int8",
    ),
    Option(
        "w4a8",
        text,
        "quantize the activations of steps of 256 tokens and more where weights have 4 bits, on a GPU of compute "
        "capability 9.0: quicker, as measured",
        metavar="off|int8|fp8",
    ),
    Option(
        "load_format",
        text,
        "dummy fills the weights from the seed instead of the files, dummy-small with small numbers",
        metavar="auto|dummy|dummy-small",
    ),
    Option("seed", integer, "seed of dummy weights and of requests that bring none"),
    Option("max_model_len", integer, "longest prompt and output together, in tokens; the model's own limit by default"),
    Option("block_size", integer, "tokens in a block of the KV cache"),
    Option("num_gpu_blocks_override", integer, "blocks in the KV cache, on a CPU too; sized from memory by default"),
    Option("gpu_memory_utilization", number, "share of a GPU's memory to use; on a CPU it has no effect"),
    Option(
        "reserve_memory_mb",
        integer,
        "GPU memory in MB that is left free at least, for other programs, whatever --gpu-memory-utilization is",
    ),
    Option(
        "swap_space_gb",
        number,
        "GB of the host's memory for the KV cache of preempted sequences, which is copied back then; with 0 it is "
        "computed again",
    ),
    Option("max_num_seqs", integer, "sequences that run at the same time; by default 64 on a CPU, 256 on a GPU"),
    Option(
        "max_num_batched_tokens",
        integer,
        "tokens computed in a step, longer prompts are cut in chunks; by default 512 on a CPU, 8192 on a GPU",
    ),
    Option("max_waiting", integer, "requests that may wait; one more gets 429", ("--max-queued-requests",)),
    Option("max_logprobs", integer, "most alternatives that a request may ask for at each token"),
    Option("enable_prefix_caching", switch, "keep the KV blocks of earlier prompts and share equal ones"),
    Option("num_threads", integer, "threads of the matrix products on a CPU; the cores of this process by default"),
    Option("shutdown_grace_s", number, "seconds that running requests get after SIGTERM", ("--shutdown-timeout",)),
    Option(
        "tensor_parallel_size",
        integer,
        "ranks that share each layer; by default the engine chooses for the ranks that MPI has started",
        ("-tp", "--tensor-parallel"),
    ),
    Option(
        "pipeline_parallel_size",
        integer,
        "stages, each of which holds one run of layers on its own ranks; by default as above",
        ("-pp", "--pipeline-parallel"),
    ),
    Option("check_ranks", switch, "compare what ranks compute after every step, for hunting faults; slow"),
    Option(
        "split",
        text,
        "how stages share the layers: evenly, or each as many as its ranks have free memory for, which may then be of "
        "different kinds; memory with no sizes given makes each rank a stage",
        metavar="even|memory",
    ),
    Option(
        "allreduce",
        text,
        "what ranks send each other when they add up: auto is exact; int8 and int8-plain where it is quicker; of CPUs "
        "float32 or bfloat16; of GPUs one of the ways that are measured at start: the host's window, peer memory, both "
        "over islands, NCCL",
        metavar="auto|float32|bfloat16|int8|int8-plain|window|peer|islands|nccl",
    ),
    Option(
        "dual_stream",
        text,
        "compute large steps in two halves, so that ranks add up one while the other is computed; auto: on GPUs, from "
        "the number of tokens on from which that is found quicker at start",
        metavar="auto|on|off",
    ),
    Option(
        "enable_chunked_prefill",
        switch,
        "cut long prompts in chunks",
        served=(True,),
        instead="long prompts are always cut",
    ),
    Option("tool_call_parser", text, "how tool calls are found in the text", instead="tools are not there yet"),
    Option("reasoning_parser", text, "how reasoning is found in the text", instead="it stays part of the text"),
)
