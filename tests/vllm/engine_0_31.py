"""The shortest proof with whatever vLLM is found first: DRAM and the store give back what was computed, byte for byte
(on the rig) and bit for bit (on the real engine). Prints the version last.

Run by test_versions.py with 0.31 on PYTHONPATH:  python engine_0_31.py STORE_ADDRESS
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # behind the installed packages: this folder is named like one of them


def main(address: str) -> None:
    from engine_process import EngineProcess
    from rig import BLOCK, Rig, tokens

    from kvhearth.connector.tiny_models import make_tiny_model

    prompt = tokens(1, 10 * BLOCK + 3)
    for admission in ("eager", "lazy"):
        with Rig(store=address, blocks=24, extra={"dram_admission": admission}) as rig:
            rig.run("a", prompt)
            for seed in range(2, 8):
                rig.run(f"push{seed}", tokens(seed, 200))
            assert rig.run("dram", prompt) >= 9 * BLOCK, admission
    with Rig(store=address) as rig:
        assert rig.run("store", prompt) == 10 * BLOCK
    tier = {"type": "StoreTier", "module_path": "kvhearth.connector", "address": address, "lookup_timeout_seconds": 5.0}
    extra = {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model("llama", Path(folder) / "llama")
        mine = [random.Random(3).randrange(10, 4000) for _ in range(1000)]
        with EngineProcess(model, extra) as engine:
            engine.generate(mine)
            local = engine.generate(mine)
            engine.call("settle")
            engine.call("forget_hbm")
            from_dram = engine.generate(mine)
            engine.call("forget_hbm")
            engine.call("forget_dram")
            from_store = engine.generate(mine)
            assert local["cached"] == from_dram["cached"] == from_store["cached"] == 992
            assert local["logprobs"] == from_dram["logprobs"] == from_store["logprobs"]
            assert engine.call("metrics")["kvhearth_connector_get_bytes"] > 0
    import vllm

    print(vllm.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
