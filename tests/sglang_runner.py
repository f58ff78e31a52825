"""SGLang's own model runner on the CPU engine, without a server: for tests that compare with what a model file computes."""
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_runner(model: Path, defaults: dict):
    """(SGLang's one_batch module, its runner of the model in that folder, the server's arguments).

    defaults: those of scripts/cpu_engine/serve.py, whose `prepare` was called. Once a process.
    """
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args
    argv = ["--model-path", str(model), "--tokenizer-path", str(ROOT / "scripts/tiny_kimi"), "--disable-radix-cache"]
    for flag, value in (defaults | {"--max-total-tokens": "1024"}).items():
        argv += [flag] if value is True else [flag, value]
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    one_batch.publish(server_args, role="scheduler",
                      ranks=one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=0))
    one_batch._init_process_global_configs()
    return one_batch, one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0].torch_runner, server_args
