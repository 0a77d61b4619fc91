"""Make json_schemas.json.xz: the JSON Schema Test Suite (draft 2020-12), from the source package of PyPI `jsonschema`.

    python tests/golden/make_json_schemas.py jsonschema-4.23.0.tar.gz

The suite is under the MIT license, Copyright (c) 2012 Julian Berman.
"""

import json
import lzma
import sys
import tarfile
from pathlib import Path

TARGET = Path(__file__).parent / "json_schemas.json.xz"
FOLDER = "/json/tests/draft2020-12/"


def main(source: str) -> None:
    cases = []
    with tarfile.open(source) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            before, _, name = member.name.partition(FOLDER)
            if not before or "/" in name or not name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            for group in json.load(file):
                tests = [[test["data"], test["valid"]] for test in group["tests"]]
                title = f"{name.removesuffix('.json')}: {group['description']}"
                cases.append({"title": title, "schema": group["schema"], "tests": tests})
    TARGET.write_bytes(lzma.compress(json.dumps(cases, ensure_ascii=False).encode()))
    print(f"{TARGET}: {len(cases)} schemas, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
