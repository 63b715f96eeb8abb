"""Child process of test_caches.py: compiles the stand-in's model case by case and says what the caches did.

    python cache_child.py FOLDER STAND_IN CASES

Without the stand-in nothing of ours is imported but through torch.compile: what a user's second process does.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor import config

MODEL = (
    "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x).relu()\n"
)


def load_model(folder: Path, lines_above: int) -> torch.nn.Module:
    path = folder / f"above-{lines_above}" / "child_model.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n" * lines_above + MODEL)
    spec = importlib.util.spec_from_file_location("child_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Model(8, 8)


def run(folder: Path, case: dict) -> dict:
    torch._dynamo.reset()
    counters.clear()
    if "delete" in case:
        shutil.rmtree(folder / "cache" / case["delete"])
    x = torch.arange(24.0).reshape(3, 8)
    model = load_model(folder, case.get("lines_above", 0))
    backend, options = case.get("backend", "ltx"), case.get("options", {"ltx_inductor.cpu": True})
    with torch.no_grad():
        plain = torch.nn.functional.linear(x, model.weight, model.bias)
        if backend == "registered":
            import ltx_inductor

            with ltx_inductor.enabled(options):
                out = torch.compile(model)(x)
        else:
            out = torch.compile(model, backend=backend, options=options)(x)
    assert torch.allclose(out, -plain) or torch.allclose(out, plain.relu())
    answer = {
        "rewritten": torch.allclose(out, -plain),
        "aot": "hit" if counters["aot_autograd"]["autograd_cache_hit"] else "miss",
        "fx": "hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss",
    }
    if backend != "inductor":
        import ltx_inductor

        answer["report"] = ltx_inductor.last_report().to_dict()
    return answer


if __name__ == "__main__":
    config.compile_threads = 1
    home, stand_in, cases = Path(sys.argv[1]), sys.argv[2] == "yes", json.loads(sys.argv[3])
    if stand_in:
        from tests.stand_in import put_in

        put_in()
    print("ANSWER" + json.dumps([run(home, case) for case in cases]))
