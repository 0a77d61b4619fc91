"""What a second start costs: seconds of `everwarm.load` from an existing pack until a token is computed, and memory.

    python benchmarks/load.py MODEL [--runs 5]

Each run is a process of its own, so that nothing but the pack survives; the first, which may build the pack, is not
counted. RSS is read after 100 generated tokens and set beside the size of the pack.
"""

import argparse
import json
import statistics
import subprocess
import sys

ONE = """
import json, sys, time
start = time.perf_counter()
import everwarm.llm
imports = time.perf_counter() - start
def rss():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
imported = rss()
start = time.perf_counter()
llm = everwarm.load(sys.argv[1])
loaded = time.perf_counter() - start
llm.generate(tokens=[1], max_tokens=1, ignore_eos=True, cache=False)
first = time.perf_counter() - start
llm.generate(tokens=[1], max_tokens=100, ignore_eos=True, cache=False)
pack = sum(entry.size_bytes for entry in llm._source.pack.entries.values())
figures = {"import_s": imports, "load_s": loaded, "first_token_s": first}
print(json.dumps(figures | {"imported_bytes": imported, "rss_bytes": rss(), "pack_bytes": pack}))
llm.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", ONE, asked.model], check=True, capture_output=True).stdout)
        for _ in range(asked.runs + 1)
    ][1:]
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    limit = 1.1 * middle["pack_bytes"] + 200e6
    print(
        f"imports {middle['import_s'] * 1e3:.0f} ms, then load {middle['load_s'] * 1e3:.0f} ms, "
        f"first token {middle['first_token_s'] * 1e3:.0f} ms after the call of load"
    )
    print(
        f"RSS {middle['rss_bytes'] / 1e6:.0f} MB ({middle['imported_bytes'] / 1e6:.0f} MB of it after import), "
        f"pack {middle['pack_bytes'] / 1e6:.0f} MB, 1.1 x pack + 200 MB is {limit / 1e6:.0f} MB"
    )
    print(json.dumps({"benchmark": "load", "model": asked.model, "runs": runs}))


if __name__ == "__main__":
    main()
